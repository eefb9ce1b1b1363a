// SHA-256 (FIPS 180-4).
#pragma once
#include <string>
#include <string_view>

namespace kvlab {

std::string sha256_hex(std::string_view bytes);  // 64 hexadecimal digits

}  // namespace kvlab
