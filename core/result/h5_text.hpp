// Text as HDF5 readers can take it.
#pragma once
#include <string>
#include <string_view>

namespace kvlab::h5 {

// The same text with every byte that is not part of valid UTF-8, and every NUL (HDF5 text ends there), replaced by
// U+FFFD.
std::string valid_utf8(std::string_view text);

}  // namespace kvlab::h5
