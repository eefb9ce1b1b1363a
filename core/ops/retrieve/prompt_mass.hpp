// Mass of a prompt's tokens (kvlab/blocks.hpp) by kernels that know the softmax's sums, and the reference.
#pragma once
#include <kvlab/blocks.hpp>

namespace kvlab::ops {

// add_prompt_mass by LayerPrefill::lse, of one row. false: there is no lse, and nothing was done.
bool prompt_mass_at_once(const LayerPrefill& kv, int newest, const KeyBlocks& blocks, Stream s);

void add_prompt_mass_reference(const LayerPrefill& kv, int newest, const KeyBlocks& blocks);

}  // namespace kvlab::ops
