// The parameters of cells, flat, and what tells cells of one policy apart in tables for people.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace kvlab {

// Leaves of a `params` text (JSON), in the words of an experiment file: {"scorer": {"snapkv": {"window": 8}}, "budget":
// {"tokens": 64}} has "window" -> "8" and "budget.tokens" -> "64". A plugin without parameters, "codec.x", has "true".
// Nothing for what is no JSON object.
std::map<std::string, std::string> flat_parameters(const std::string& params);

// What of `own` is not so in every one of `others` (`params` texts, JSON; `own` may be among them), as "window=8
// split.adakv.floor=0.2"; nothing when they are alike. The budget's amount is left out: it has a column of its own.
std::string varying_text(const std::string& own, const std::vector<std::string>& others);

}  // namespace kvlab
