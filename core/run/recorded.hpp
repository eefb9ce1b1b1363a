// Page lists of a cell that was run with `metrics: [trace]`, for `inject: {trace: FILE}`.
#pragma once
#include <string>
#include <vector>

#include "compose/injection.hpp"
#include "run/items.hpp"

namespace kvlab {

// cell: an id, "" = the file's only cell with page lists. Layers without lists (dense ones) are left out. Errors name
// the file; Errc::data where it has no such lists.
RecordedTrace read_recorded(const std::string& file, const std::string& cell);

// Injection::follows of a cell with these items, which Engine::ask numbers by their place: the same question, or turn,
// of the same sample. Samples start again where fewer were recorded. Errc::config where there is no such question.
std::vector<std::int32_t> follow(const RecordedTrace& recorded, const std::vector<Item>& items);

}  // namespace kvlab
