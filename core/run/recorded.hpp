// Page lists of a cell that was run with `metrics: [trace]`, for `inject: {trace: FILE}`.
#pragma once
#include <string>

#include "host/injection.hpp"

namespace kvlab {

// cell: an id, "" = the file's only cell with page lists. Layers without lists (dense ones) are left out. Errors name
// the file; Errc::data where it has no such lists.
RecordedTrace read_recorded(const std::string& file, const std::string& cell);

}  // namespace kvlab
