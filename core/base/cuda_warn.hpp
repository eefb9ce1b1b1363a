// Warnings of libkvlab_cuda.so, which does not link to libkvlab's log.
#pragma once
#include <string>

namespace kvlab::cuda {

// Calls log::warn of libkvlab, which shows each text once. Thread-safe; host code only.
void warn(const std::string& text);

// The type of `kvlab_cuda_warn_through`, which libkvlab_cuda.so exports. It sets the function that warn() calls.
using WarnThrough = void (*)(void (*say)(const char* text));

}  // namespace kvlab::cuda
