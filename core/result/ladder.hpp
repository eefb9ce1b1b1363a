// Ladders: where a policy stands between random eviction and an oracle that have the same budget, question by question
// (result/place.hpp). random -> what ranks by age -> a method without one of its components -> the method -> oracle.
#pragma once
#include <string>
#include <vector>

#include "result/compare_report.hpp"
#include "result/report_blocks.hpp"
#include "result/report_layout.hpp"

namespace kvlab::results {

// Adds a table for each block and budget that has a row of the plugin or policy `random` and one labelled `oracle`. A
// page's warnings say why another block has no ladder. Draws of random (its seeds) count together, as one policy whose
// score of a question is their mean. Rows stand in this order: random, rows of `by_age`, methods by their place, each
// behind its ablations, then rows that failed, the oracle last. Where a block has an oracle that evicts and one that
// selects (their parameters name a scorer or a selector), it has two ladders. Each holds random, the rows of its way,
// and those whose way nothing tells: policies that do all by themselves. Else the first oracle is the upper end of all.
// Budgets are equal if their bytes are, or if their tokens are within 5 %. Policies without a budget are
// named below the table. Random weights have no ladder.
void add_ladders(const std::vector<Block>& blocks, const Samples& samples, ReportPage& page);

// The rows of all ladders with exact numbers: the ends of an interval, bytes, and how many questions count.
std::string ladders_csv(const std::vector<Block>& blocks, const Samples& samples);

}  // namespace kvlab::results
