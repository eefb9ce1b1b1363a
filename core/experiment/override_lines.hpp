// How the text of an experiment holds the overrides of its run.
#pragma once
#include <string>
#include <vector>

namespace kvlab {

// The file's bytes, then a line "# --set KEY=VALUE" for each override. Where the file itself ends with such a line, the
// line "# overrides:" stands between its lines and those of the run, also if the run has none.
std::string add_overrides(const std::string& text, const std::vector<std::string>& sets);

// Takes what add_overrides() added off the text, but for a final newline. Earlier versions wrote no "# overrides:", so
// all lines of overrides at the end of their texts count.
std::vector<std::string> take_overrides(std::string& text);

}  // namespace kvlab
