// What a process does before it times a cell. The first prompt of a shape loads kernels, makes plans of cuDNN and
// cuBLASLt, takes memory and starts threads. That is not what is timed.
//
//   warm_shapes  runs the cell's shapes, whole prompts, on an engine that is gone afterwards. The cell's engine,
//   policy,
//                ledger and random numbers never see it. It runs once per process and shape, on GPUs only: on the CPU
//                the first cell takes as long as the others (1024 tokens: 313 ms, the next four 309 to 365 ms).
//   touch        runs a few tokens on the cell's own engine, for what each engine has of its own.
#pragma once
#include <vector>

#include "run/cell_input.hpp"

namespace kvlab {

// The prompts that warm_shapes runs: the longest of each length that kernels tell apart (ops::prompt_room), longest
// first.
std::vector<const Item*> prompts_of_shapes(const std::vector<Item>& items);

// Runs those prompts that are new to this process under such a policy and so many slots. Decode steps of every number
// of rows up to `slots` follow. Returns how many prompts it ran. It says nothing of what does not fit: the cell will.
int warm_shapes(const CellInput& in, int slots);

// make_engine, after warm_shapes where the cell is timed on a GPU.
Engine warmed_engine(const CellInput& in, int slots);

// A few tokens and steps in a slot that is free again; they are not in the ledger's peak.
void touch(Engine& engine, const Item& item);

}  // namespace kvlab
