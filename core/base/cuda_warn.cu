#include "base/cuda_warn.hpp"

#include <atomic>

namespace {
std::atomic<void (*)(const char*)> door = nullptr;
}

void kvlab::cuda::warn(const std::string& text) {
  if (const auto say = door.load()) say(text.c_str());
}

extern "C" void kvlab_cuda_warn_through(void (*say)(const char* text)) { door = say; }
