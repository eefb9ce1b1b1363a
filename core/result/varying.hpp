// Tells cells of one policy apart, in tables for people.
#pragma once
#include <string>
#include <vector>

namespace kvlab {

// What of `own` is not so in every one of `others` (`params` texts, JSON; `own` may be among them), as "window=8
// split.adakv.floor=0.2"; nothing when they are alike. The budget's amount is left out: it has a column of its own.
std::string varying_text(const std::string& own, const std::vector<std::string>& others);

}  // namespace kvlab
