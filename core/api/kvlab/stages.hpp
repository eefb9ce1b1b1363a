// Roles of a second stage. A first method chooses or scores, and the second one works on what it gives. The host runs
// both: an entry of an experiment names the second beside the first, as in `quest: {pruner: twilight}` and
// `snapkv: {rescorer: criticalkv}`. So a second stage is written once, and holds nothing of a first one.
//
// Of what needs() asks for, a second stage gets devices, dtypes, scratch_numbers and capturable. A pruner may have
// dense_layers, too, and a rescorer the output projection, where the scorer does not ask for it. Every other need is
// Errc::plugin.
#pragma once
#include <cstdint>

#include "kvlab/kv.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// Of the tokens that a selector or a policy lets a step's attention read, chooses those that it reads. Tokens keep
// their places: the host refuses a first method that evicts, moves or rewrites them, or changes their logits.
class Pruner {
 public:
  virtual ~Pruner() = default;
  // dense_layers: lists of these first layers stay as they are, and no callback sees the layers.
  virtual Needs needs() const { return {}; }
  // As Scorer::attach.
  virtual void attach(const Shape&, Workspace&) {}
  // The cache has `newest` new tokens at the last places of each row's heads: after the attention of a prompt's chunk,
  // and in each decode step before prune(). kv.queries are a step's.
  virtual void appended(const LayerKv& /*kv*/, int /*newest*/, Stream) {}
  // out: the tokens to read, with room for all tokens of a head. Candidates are all tokens of the listed pages, or the
  // listed tokens. The first method's pins are read in any case, whether they are candidates or not. A step without a
  // list has no call.
  virtual void prune(const LayerStep& step, const PageList& candidates, TokenList out, Stream s) = 0;
  virtual void prune(const LayerStep& step, const TokenList& candidates, TokenList out, Stream s) = 0;
};

// Ranks the tokens of a prompt's end anew, once it is known how many each KV head keeps. Decode steps that evict rank
// by the scorer alone.
class Rescorer {
 public:
  virtual ~Rescorer() = default;
  virtual Needs needs() const { return {}; }
  // scores: [row, kv_head, token], in and out. keep: [row, kv_head] tokens that the head keeps, pins included, as the
  // budget divided them by the scorer's scores. pins: of the prompt's row; they stay whatever their score. kv has no
  // queries and no mass.
  virtual void rescore(const LayerKv& kv, Pins pins, View<const std::int32_t, 2> keep, Scores scores, Stream s) = 0;
};

namespace ops {

// out(row, kv_head) = trunc(share * (keep(row, kv_head) - pinned)), at least 0. 0 <= share <= 1, in f64.
void share_of_keep(View<const std::int32_t, 2> keep, int pinned, double share, View<std::int32_t, 2> out, Stream s);

}  // namespace ops
}  // namespace kvlab
