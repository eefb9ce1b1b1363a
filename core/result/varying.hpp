// The parameters of cells as a flat map, and a text that tells cells of one policy apart in tables.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace kvlab {

// Leaves of a `params` text (JSON), in the words of an experiment file. {"scorer": {"snapkv": {"window": 8}}, "budget":
// {"tokens": 64}} has "window" -> "8" and "budget.tokens" -> "64". A plugin without parameters, "codec.x", has "true".
// Empty if the text is no JSON object.
std::map<std::string, std::string> flat_parameters(const std::string& params);

// The parameters of `own` that any of `others` lacks or has with another value: "window=8 split.adakv.floor=0.2", or
// nothing. All are `params` texts (JSON); `own` may be among `others`. The budget's amount is left out, since it has a
// column of its own.
std::string varying_text(const std::string& own, const std::vector<std::string>& others);

}  // namespace kvlab
