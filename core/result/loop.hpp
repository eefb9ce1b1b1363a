// Answers that repeat themselves until they end.
#pragma once
#include <string_view>

namespace kvlab {

// Does the text end in a phrase of two words or more that stands there three times in a row (after Holtzman et al.
// 2020)? The phrase may begin at any of its words. Words lie between white space; a character of Chinese, Japanese or
// Korean is a word. cut: the text was ended by a limit of length, so its last word may be a part of one and is left
// out.
bool ends_in_loop(std::string_view text, bool cut);

}  // namespace kvlab
