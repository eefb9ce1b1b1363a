// What a prompt's tokens attend to in one KV head.
#pragma once
#include <cstdint>

namespace kvlab {

// A token at text position p sees the tokens before it at positions below `sinks` or above p - window, and itself. A
// window of 0 hides nothing.
struct PromptMask {
  std::int32_t sinks = 0, window = 0;

  bool hides(std::int32_t position, std::int32_t own) const {
    return window > 0 && position >= sinks && position <= own - window;
  }
};

}  // namespace kvlab
