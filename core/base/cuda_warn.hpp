// Warnings of libkvlab_cuda.so, which does not link to libkvlab's log.
#pragma once
#include <string>

namespace kvlab::cuda {

// log::warn of libkvlab: say it wherever it is true, it is shown once. Thread-safe; host code only.
void warn(const std::string& text);

// libkvlab_cuda.so exports one as `kvlab_cuda_warn_through`: it takes the function that warn() calls.
using WarnThrough = void (*)(void (*say)(const char* text));

}  // namespace kvlab::cuda
