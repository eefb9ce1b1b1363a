// Warms a process up before it times a cell. The first prompt of a shape loads kernels, makes plans of cuDNN and
// cuBLASLt, takes memory and starts threads. Timed prompts must not pay for that.
//
//   warm_shapes  runs the cell's shapes, whole prompts, on an engine that is gone afterwards. It does not touch the
//                cell's engine, policy, ledger and random numbers. It runs once per process and shape, on GPUs only: on
//                the CPU the first cell takes as long as the others (1024 tokens: 313 ms, the next four 309 to 365 ms).
//   touch        runs a few tokens on the cell's own engine: each engine takes memory of its own.
#pragma once
#include <vector>

#include "run/cell_input.hpp"

namespace kvlab {

// The prompts that warm_shapes runs: the longest of each length that kernels tell apart (ops::prompt_room), longest
// first.
std::vector<const Item*> prompts_of_shapes(const std::vector<Item>& items);

// Runs the prompts that are new to this process with this policy and number of slots. Decode steps of every number of
// rows up to `slots` follow. Returns how many prompts it ran. It does not report a prompt that does not fit: the cell
// will.
int warm_shapes(const CellInput& in, int slots);

// make_engine, after warm_shapes where the cell is timed on a GPU.
Engine warmed_engine(const CellInput& in, int slots);

// Runs a few tokens and steps in a slot, frees it and resets the ledger's peak.
void touch(Engine& engine, const Item& item);

}  // namespace kvlab
