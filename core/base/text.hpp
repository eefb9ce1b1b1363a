// Small helpers for messages: lists of words, the nearest known word, text that a terminal can take.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

// Levenshtein distance in bytes: an insertion, a deletion, a replacement and a swap of two neighbours cost 1 each.
std::size_t edit_distance(std::string_view a, std::string_view b);

// The known word nearest to `word`, ties to the earlier one. None if more than a third of the longer word's letters
// differ; one may always differ, and so may the ending ("policy" is near "policies").
std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& known);

// " (did you mean 'x'?)" or nothing.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& known);

std::string join(const std::vector<std::string>& words, std::string_view between = ", ");

// The text without power over a terminal. Control characters and characters that turn the direction of writing
// become \x1b, \u202e and the like; bytes that are no UTF-8 become U+FFFD. Line ends and tabs stay.
std::string printable(std::string_view text);

// Text of others for messages and result files: printable and on one line; line ends become \n.
// Only the first 2000 bytes are shown.
std::string one_line(std::string_view text);

}  // namespace kvlab
