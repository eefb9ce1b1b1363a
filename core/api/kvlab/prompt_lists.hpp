// What a prompt's tokens attend to, where a policy chooses it chunk by chunk.
#pragma once
#include "kvlab/edits.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"

namespace kvlab {

// A second base of a Policy. Prompts then come in its chunks, whatever chunks the run asks for. Pages that lie on the
// host stay there when a further prompt begins. RopeRegime::original alone, without Mass::all, prompt masks,
// finish_prompt, whole prompts (Needs::chunked_prompts) and a recording: Errc::config. Chunks that attend to a list
// take the general kernel of decode steps, on a GPU, too. It reads codes where the cache stores codes, the chunk's own
// tokens included.
class ChoosesInPrompts {
 public:
  virtual ~ChoosesInPrompts() = default;
  // Most tokens of a chunk. Core asks before attach. 0 = prompts attend to everything, and nobody calls select_chunk.
  virtual int prompt_chunk() const = 0;
  // Once per layer and chunk, before its attention. The cache holds the chunk's tokens, kv.chunk_queries has their
  // queries, and kv.lse is empty. Edits are those of select(): place and recall for this attention, one list of pages,
  // and a greatest distance; else Errc::plugin. Of listed pages a token sees what lies before it, and itself. Without
  // edits the chunk attends to everything. Where a list or a distance was given, prefill() gets LayerPrefill::lse on
  // either device, of what was read.
  virtual void select_chunk(const LayerPrefill& kv, Edits& edits, Stream s) = 0;
};

}  // namespace kvlab
