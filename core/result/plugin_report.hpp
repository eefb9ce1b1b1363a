// The plugins that wrote a result or profile file, as a table for people.
#pragma once
#include <string>

#include "result/report.hpp"

namespace kvlab::results {

// A row per plugin, version and library. A result file's rows also count the cells that used the plugin. csv is the
// rows alone. Errc::result_file for any other file.
std::string plugin_report(const std::string& path, Format format);

}  // namespace kvlab::results
