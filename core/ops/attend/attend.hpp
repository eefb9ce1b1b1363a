// Attention over paged K and V while decoding: one query token per row.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/policy.hpp>
#include <kvlab/stream.hpp>

namespace kvlab::ops {

// Token state that takes attention mass (kvlab/policy.hpp). column < 0: none does.
struct MassColumn {
  int column = -1;
  GroupRule rule = GroupRule::mean;
  // The step looks at it at its end alone, unless base/late_state.hpp knows better: a GPU's executor may add to it
  // then.
  bool may_wait = false;
};
struct LateMass;  // late_mass.hpp

struct AttendArgs {
  PagedKv kv;                    // all listed pages must be resident (a null frame is Errc::internal)
  View<const float, 3> queries;  // [row, query head, head_dim], already rotated for the regime
  // Optional list of attended pages or tokens: [row, kv_head, i], ascending, without repeats. Without a list the op
  // attends to all tokens; two lists are Errc::internal. A count of 0 attends to nothing.
  const PageList* pages = nullptr;    // logical pages
  const TokenList* tokens = nullptr;  // places in the cache; their pages must be resident
  float softmax_scale = 0;            // 0 = 1 / sqrt(head_dim)
  int window = 0;  // the model's sliding window in tokens, 0 = none: a query sees positions > last - window
  const std::int32_t* last = nullptr;  // [row] text position of the query
  // Optional, with `last`: [kv_head] what tokens of a prompt see, by stored positions; memory of the device.
  const PromptMask* masks = nullptr;
  View<float, 3> out;       // [row, query head, head_dim]
  void* rounded = nullptr;  // optional, CUDA only: out again in the cache's 16-bit dtype; out is dense then
  View<float, 2> lse;       // optional: [row, query head], natural log
  View<float, 3> mass;      // optional: [row, query head, token place]; 0 for every place that was not attended
  // Optional, with `mass`: the op adds the mass to a column of `kv`. `mass` is then room for it, and may hold anything
  // afterwards.
  MassColumn mass_into;
  // Optional, with mass_into: where the op may leave the mass instead. The CPU adds it at once.
  LateMass* late = nullptr;
  // Optional, without lists and mass: [row, i, token place, query head of the group]; kvlab/kv.hpp says more. Room for
  // fewer tokens than a head holds is Errc::internal on the CPU.
  HeadLogits logits;
  // Optional, without mass, logits and a list of pages: [row, query head, token place], added to the scaled logits.
  // -inf = the query head does not read the token. Room for fewer tokens than a head holds is Errc::internal on the
  // CPU; on CUDA it counts as 0 for the others.
  View<const float, 3> bias;
  // Above 0: a token that lies further than so many text positions before the query counts as that far, so its key is
  // turned on. It needs `last`, a RoPE table and RopeRegime::original: else Errc::internal.
  int most_distance = 0;
};

// Splits every row into chunks of pages or of listed tokens and merges their partial softmaxes in order. On the CPU
// the result depends neither on the number of threads nor on other rows. On CUDA other rows may change how the
// pipelined kernel cuts a row, so they may change its last bits. A list of all pages equals no list bit for bit; a list
// of all tokens equals it within rounding. A row without tokens gets out 0 and lse -inf. Bytes: K, V and positions of
// the listed pages or tokens. On the CPU a list that breaks the rules above is Errc::internal. On CUDA the host does
// not read lists, so nothing checks them; the kernel skips listed tokens that the cache does not have.
// ops/attend/attend.cuh says what goes to the pipelined kernel and what to the general one.
void attend(const AttendArgs& a, Workspace& w, Stream s);
void attend_reference(const AttendArgs& a);  // plain loops, double accumulation: the oracle

}  // namespace kvlab::ops
