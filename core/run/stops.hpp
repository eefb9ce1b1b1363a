// Stop texts: an answer ends where its text contains one of them, and the text before it is what is scored. A task
// gives them in its question's record (TaskQuestion::record), as the texts of the field `stop`.
#pragma once
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

// ModelTaskEnv::records refuses a record whose field of this name is no list of texts, or has an empty one.
inline constexpr const char* stop_field = "stop";
// The header of a data file, whose own `stop` is checked likewise (datasets/README.md).
inline constexpr const char* header_field = "kvlab_dataset";

// Bytes of the answer before the first stop text that it contains; npos = none. A stop text of white space alone counts
// only after another character: an answer may begin with a line end.
inline std::size_t stop_place(std::string_view answer, const std::vector<std::string>& stops) {
  constexpr const char* white = " \t\r\n\f\v";
  const std::size_t first = std::min(answer.find_first_not_of(white), answer.size());
  std::size_t place = answer.npos;
  for (const std::string& stop : stops)
    place = std::min(place, answer.find(stop, stop.find_first_not_of(white) == stop.npos ? first : 0));
  return place;
}

}  // namespace kvlab
