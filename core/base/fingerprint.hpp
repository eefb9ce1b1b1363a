// FNV-1a, 64 bits: tells files and vocabularies apart; no defence against someone who wants a collision.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace kvlab {

class Fingerprint {
 public:
  Fingerprint& add(std::string_view bytes) {
    for (const char c : bytes) value_ = (value_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    return add(std::uint64_t{bytes.size()});
  }
  Fingerprint& add(std::uint64_t number) {
    for (int i = 0; i < 8; ++i) value_ = (value_ ^ ((number >> (8 * i)) & 0xff)) * 0x100000001b3ull;
    return *this;
  }
  std::uint64_t value() const { return value_; }
  std::string hex() const {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value_));
    return text;
  }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ull;
};

}  // namespace kvlab
