// The narrow roles. The host composes Scorer + Budget + schedule + Codec + Selector + placement into a Policy from
// YAML, so a method implements only what is its own.
#pragma once
#include "kvlab/policy.hpp"

namespace kvlab {

// How important is each cached token, per KV head? Core does the rest: pins, top-k, eviction, compaction, accounting.
class Scorer {
 public:
  virtual ~Scorer() = default;
  virtual Needs needs() const { return {}; }

  // Kept whatever their score, within a budget of `tokens` per KV head.
  virtual Pins pins(int /*tokens*/) const { return {}; }

  // out[row, kv_head, token] f32, higher = keep; inf is above and -inf below all others, NaN fails the cell. Called at
  // the prompt's end, where kv.window_queries are there and kv.mass is that of the last chunk's queries, and by the
  // schedule while decoding, where kv.window_queries are empty and kv.mass is that of this step's query. What must
  // outlast a call lives in token state.
  virtual void score(const LayerKv& kv, Scores out, Stream s) = 0;

  // After every attention (each prompt chunk, each decode step); here a method accumulates kv.mass into token state.
  virtual void observe(const LayerKv& /*kv*/, Stream) {}

  // Decode steps between evictions when YAML names no schedule; 0 = the prompt only.
  virtual int every() const { return 0; }
};

struct Allotment {
  int layer = 0, layers = 0;
  Scores scores;                        // [row, kv_head, token]
  View<const std::int32_t, 2> length;   // [row, kv_head] tokens in the cache
  const Pins* pins = nullptr;           // [row]
  const std::int32_t* total = nullptr;  // [row] mean tokens per KV head and layer, pins included
  View<std::int32_t, 2> keep;           // out: [row, kv_head] tokens to keep, pins included, at most length
  const LayerKv* kv = nullptr;          // positions, scratch
  // pins and total are for ops; these are the same numbers in host memory.
  const Pins* host_pins = nullptr;
  const std::int32_t* host_total = nullptr;
};

// How a total is divided over layers and heads. `kvlab::ops` has the divisions that methods share.
class Budget {
 public:
  virtual ~Budget() = default;
  virtual void allot(const Allotment& a, Stream s) = 0;
};

class Codec {
 public:
  virtual ~Codec() = default;
  virtual CodecSpec spec() const = 0;
};

// Which pages does this step's attention read? Pins are added by core.
class Selector {
 public:
  virtual ~Selector() = default;
  virtual Needs needs() const { return {}; }
  virtual void select(const LayerStep& step, PageList out, Stream s) = 0;
  virtual Pins pins() const { return {}; }
};

}  // namespace kvlab
