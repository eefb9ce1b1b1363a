// SHA-256 (FIPS 180-4).
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvlab {

// The hash of bytes that come piece by piece.
class Sha256 {
 public:
  Sha256();
  void add(std::string_view bytes);
  std::string hex();  // 64 hexadecimal digits; nothing may be added afterwards

 private:
  std::array<std::uint32_t, 8> h_;
  std::string rest_;  // less than a block
  std::uint64_t bytes_ = 0;
};

std::string sha256_hex(std::string_view bytes);

}  // namespace kvlab
