// The narrow roles. The host composes Scorer + Budget + schedule + Codec + Selector + placement into a Policy from
// YAML, so a method implements only what is its own.
#pragma once
#include <cstdint>
#include <vector>

#include "kvlab/policy.hpp"

namespace kvlab {

// How important is each cached token, per KV head? Core does the rest: pins, top-k, eviction, compaction, accounting.
class Scorer {
 public:
  virtual ~Scorer() = default;
  virtual Needs needs() const { return {}; }

  // As Policy::load_profile.
  virtual void load_profile(const Profile&) {}

  // Core calls it once, before any sequence. Take memory that outlasts a call here (Workspace::state).
  virtual void attach(const Shape&, const BudgetAmount&, Workspace&) {}

  // Tokens that stay whatever their score, under a budget of `tokens` per KV head.
  virtual Pins pins(int /*tokens*/) const { return {}; }

  // out[row, kv_head, token] f32, higher = keep. inf ranks above all others and -inf below; NaN fails the cell.
  // Core calls it at the prompt's end, where kv.window_queries are set and kv.mass is that of the last chunk's queries
  // (under Mass::decode it is empty). The schedule calls it while decoding, where kv.window_queries are empty,
  // kv.queries are the step's and kv.mass is that of these. Numbers that must outlast a call live in token state or in
  // the state that attach took.
  virtual void score(const LayerKv& kv, Scores out, Stream s) = 0;

  // True: score() keeps the promise of Needs::capturable too. Then a GPU may replay decode steps that evict by it.
  virtual bool steady_score() const { return false; }

  // True: the newest token is the best. A decode step then ranks by text position and does not call score().
  virtual bool by_age() const { return false; }

  // The column of token state that score() copies, or null. A decode step then ranks by it and does not call score().
  virtual const char* column() const { return nullptr; }

  // After every attention (each prompt chunk, each decode step). Under Mass::decode, kv.mass is empty after a prompt
  // chunk. Needs::mass_into sums mass in token state without this callback.
  virtual void observe(const LayerKv& /*kv*/, Stream) {}

  // A sequence ended. Core clears token state and the state that attach took, but no member variable.
  virtual void release(int /*slot*/) {}

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

// What a division over layers knows of a sequence at its prompt's end: host memory. Layers that keep everything
// (Needs::dense_layers) are not among its layers.
struct Division {
  int layers = 0, kv_heads = 0;
  int tokens = 0;                    // to keep per KV head and layer: the mean, pins included
  int pinned = 0;                    // of each head
  std::vector<std::int32_t> length;  // [layer][kv_head] tokens in the cache
  std::vector<float> measured;       // [layer][kv_head][i] what measure() wrote
};

// Divides a total over layers and heads, either layer by layer in allot(), or over all layers at once, in divide().
// `kvlab::ops` has the divisions that methods share.
class Budget {
 public:
  virtual ~Budget() = default;
  virtual void allot(const Allotment&, Stream) {
    throw Error(Errc::plugin,
                "got a budget without allot(), wanted one that allots, or that has numbers() to divide by");
  }
  // Whether all KV heads of a layer get the same number. Methods may need that (Needs::uniform_heads).
  virtual bool uniform_heads() const { return false; }

  // Numbers of each KV head that divide() wants to know of a layer. With any, core calls measure() and divide() in
  // place of allot(). The whole prompt is then in the cache until its last layer is computed.
  virtual int numbers() const { return 0; }
  // Queries in the kv.window_queries of measure(), as Needs::window_queries.
  virtual int window_queries() const { return 0; }
  // At the prompt's end, in each layer, after score(). out: [row, kv_head, i]. It gets 4 numbers of scratch for each
  // token and query head of the prompt.
  virtual void measure(const LayerKv& /*kv*/, Scores /*scores*/, Pins /*pins*/, View<float, 3> /*out*/, Stream) {}
  // After the prompt's last layer. Returns [layer][kv_head] tokens to keep, pins included: at most as many as a head
  // holds, and no more than layers x kv_heads x tokens in all, or x pinned where that is more. Decode steps that evict
  // hold each head at its number.
  virtual std::vector<std::int32_t> divide(const Division&) const { return {}; }

  // Whether it divides by a profile, as Needs::profile.
  virtual bool reads_profile() const { return false; }
  // As Policy::load_profile.
  virtual void load_profile(const Profile&) {}
  // Core calls it once, before any sequence and after load_profile. Check the profile's arrays against the shape here.
  virtual void attach(const Shape&) {}
};

class Codec {
 public:
  virtual ~Codec() = default;
  virtual CodecSpec spec() const = 0;
  // Newest tokens that stay in the run's dtype. 0: tokens are stored as codes when they are appended. A grouped codec
  // encodes pages as soon as they are full and hold none of these tokens. Other codecs with a residual do the same.
  virtual int residual() const { return 0; }
};

// Chooses the pages that a step's attention reads. Core adds the pins.
class Selector {
 public:
  virtual ~Selector() = default;
  virtual Needs needs() const { return {}; }
  // As Policy::load_profile.
  virtual void load_profile(const Profile&) {}
  // As Scorer::attach.
  virtual void attach(const Shape&, const BudgetAmount&, Workspace&) {}
  // After the attention of each prompt chunk, in every layer.
  virtual void prefill(const LayerPrefill& /*kv*/, Stream) {}
  // Before attention, in every layer after the dense ones. step.mass is empty, because a step's mass exists only after
  // attention. A method that selects by mass saves it in observe, in token state or in the state that attach took.
  // Ops read token state of pages on the device alone, so a method for `placement: {tier: host}` takes state in attach.
  virtual void select(const LayerStep& step, PageList out, Stream s) = 0;
  // After attention, in every layer. step.mass is set if needs() asks for it, and 0 for tokens that were not read.
  virtual void observe(const LayerStep& /*step*/, Stream) {}
  // As Scorer::release.
  virtual void release(int /*slot*/) {}
  virtual Pins pins() const { return {}; }
};

}  // namespace kvlab
