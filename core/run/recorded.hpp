// Reads the page lists of a cell that ran with `metrics: [trace]`, for `inject: {trace: FILE}`.
#pragma once
#include <string>
#include <vector>

#include "compose/injection.hpp"
#include "model/config.hpp"
#include "run/items.hpp"

namespace kvlab {

// cell: an id; "" = the file's only cell with page lists. Layers without lists (dense ones) are left out. Throws
// Errc::data where the file has no such lists. Errors name the file.
RecordedTrace read_recorded(const std::string& file, const std::string& cell);

// Injection::follows of a cell with these items, which Engine::ask numbers by their place. An item follows the recorded
// question, or turn, of the same number in the same sample. Samples start again where fewer were recorded. Throws
// Errc::config where the trace has no such question.
std::vector<std::int32_t> follow(const RecordedTrace& recorded, const std::vector<Item>& items);

// A warning where the recorded cell had other numbers of layers or KV heads, or another page size; "" = nothing
// differs.
std::string other_shape(const RecordedTrace& recorded, const ModelConfig& model, int page_size);

}  // namespace kvlab
