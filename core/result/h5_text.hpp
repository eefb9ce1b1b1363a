// Text as HDF5 readers can take it.
#pragma once
#include <string>
#include <string_view>

namespace kvlab::h5 {

// The text with U+FFFD in place of every byte that is not part of valid UTF-8, and of every NUL (HDF5 text ends there).
std::string valid_utf8(std::string_view text);

}  // namespace kvlab::h5
