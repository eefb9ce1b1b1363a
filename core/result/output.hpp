// Whether a run may and can write its output, found out before its first cell.
#pragma once
#include <string>

namespace kvlab::results {

// Errc::result_file if a run could not write OUT in the end: it is a folder or a file that kvlab did not write, or a
// file cannot be made in the nearest folder that is there. Leaves nothing behind.
void check_output(const std::string& out_path);

// The same, and makes OUT's folder and OUT.parts; both can be written afterwards.
void open_output(const std::string& out_path);

}  // namespace kvlab::results
