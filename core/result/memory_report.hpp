// What the ledger of each cell held and moved, as tables for people.
#pragma once
#include <string>

#include "result/report.hpp"

namespace kvlab::results {

// A table for each cell with a ledger, a row for each tier, codec and tag: bytes held, as mean and most over the engine
// steps, prompts included; how many of the mean hold no token; and bytes moved to the tier in a step, as mean. A step
// without a row held nothing. csv is the rows alone, of all cells, in bytes. Errc::result_file as read_summary().
std::string memory_report(const std::string& path, Format format);

}  // namespace kvlab::results
