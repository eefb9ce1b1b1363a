// Finds the tokens that a Surplus evicts, for ops that use them before they leave.
#pragma once
#include <kvlab/edits.hpp>

#include <vector>

#include "ops/page/check.hpp"

namespace kvlab::ops {

void check_surplus(const PagedKv& kv, const Surplus& x, const char* op, Stream s);

// leaves[place] = whether the token leaves, for all places of the head. position[place] = its text position. Returns
// how many leave; where none does, the arrays mean nothing. CPU.
int find_surplus(const PagedKv& kv, const Surplus& x, int row, int head, std::vector<std::int32_t>& position,
                 std::vector<char>& leaves);

// The places that leave, ascending, in plain loops.
std::vector<int> surplus_reference(const PagedKv& kv, const Surplus& x, int row, int head);

}  // namespace kvlab::ops
