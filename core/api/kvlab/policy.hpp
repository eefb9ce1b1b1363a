// The whole life cycle of a compression policy. Most methods are smaller: see roles.hpp (Scorer, Budget, Codec,
// Selector).
//
// One callback covers all sequences of the batch ("rows") and all KV heads of one layer. Views are borrowed for the
// call. A policy holds no pages and copies none: it returns Edits.
//
// What the host knows without looking is a plain array in host memory: slots, text positions, steps, which prompts end.
// Every view (tables, lengths, scores, lists, scratch) is memory of the stream's device, which on a GPU the host may
// neither read nor write: ops do, and what the host counted goes to them by upload().
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "kvlab/edits.hpp"
#include "kvlab/kv.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// Which attention probabilities a policy wants. `decode` = each decode step's row, which sums to 1 per query head;
// `all` = the prompt's too, summed over the queries of each chunk, which costs prompt attention a second pass over its
// scores. (What the prompt's last queries attend to follows from window_queries: ops::window_votes.)
enum class Mass : std::uint8_t { none, decode, all };

// What a policy asks of the core; checked once, before any work. An unmet need is an error, never silently dense.
class Needs {
 public:
  Needs& window_queries(int n) { return window_queries_ = n, *this; }  // the last n prompt queries, after RoPE
  Needs& mass(Mass m) { return mass_ = m, *this; }                     // attention mass [row, query head, token]
  Needs& page_summary(Summary s) { return summary_ = s, *this; }       // per page, kept up to date by append and evict
  Needs& dense_layers(int n) { return dense_layers_ = n, *this; }  // first layers that are never selected or evicted
  Needs& min_pages(int n) { return min_pages_ = n, *this; }        // least pages that a Selector attends to
  Needs& rope(RopeRegime r) { return rope_ = r, *this; }
  Needs& token_state(std::string name) { return state_.push_back(std::move(name)), *this; }  // f32, starts at 0
  Needs& chunked_prompts(bool allowed) { return chunked_ = allowed, *this; }
  Needs& capturable(bool yes) { return capturable_ = yes, *this; }

  int window_queries() const { return window_queries_; }
  Mass mass() const { return mass_; }
  Summary page_summary() const { return summary_; }
  int dense_layers() const { return dense_layers_; }
  int min_pages() const { return min_pages_; }
  RopeRegime rope() const { return rope_; }
  const std::vector<std::string>& token_state() const { return state_; }
  bool chunked_prompts() const { return chunked_; }
  bool capturable() const { return capturable_; }

 private:
  int window_queries_ = 0;
  Mass mass_ = Mass::none;
  Summary summary_ = Summary::none;
  int dense_layers_ = 0;
  int min_pages_ = 0;
  RopeRegime rope_ = RopeRegime::original;
  std::vector<std::string> state_;
  bool chunked_ = true;
  bool capturable_ = false;
};

// The cache of one layer during a callback.
struct LayerKv {
  int layer = 0;
  const Shape* shape = nullptr;  // host memory, like state_names
  PagedKv pages;
  PagedKv host_pages;  // the same tokens, host tier (base and table differ)
  KvRows keys, values;
  Summaries summaries;
  Tensor<4> window_queries;   // [row, query head, w, head_dim], oldest first; prompt end only
  View<const float, 3> mass;  // [row, query head, token]; empty unless asked for
  const std::vector<std::string>* state_names = nullptr;
  Workspace* workspace = nullptr;
  const std::int32_t* slots = nullptr;  // [row] host memory, as position and step are (pages.slots: the same for ops)
  const std::int32_t* position = nullptr;  // [row] text tokens seen so far (the true position counter)
  const std::int32_t* step = nullptr;      // [row] decode steps of this sequence, 0 while prefilling
  // [row] a number of the sequence, of its sample; host memory. What is drawn at random follows it, never the slot.
  const std::uint32_t* sequence = nullptr;
  // [slot] a number of the question that the slot's decode steps belong to; memory of the stream's device, always the
  // same place. It may change between steps, so that a captured step reads it where the host runs nothing.
  const std::uint32_t* question = nullptr;
  int max_length = 0;  // no head of this layer and batch holds more tokens

  int rows() const { return pages.rows; }
  int kv_heads() const { return pages.kv_heads; }
  StateColumn state(const std::string& name) const {
    for (std::size_t i = 0; i < state_names->size(); ++i)
      if ((*state_names)[i] == name) return {keys.kv, static_cast<int>(i)};
    throw Error(Errc::plugin, "got token state '" + name + "', wanted one that needs() declares");
  }
  template <class T, std::size_t Rank>
  View<T, static_cast<int>(Rank)> scratch(const char* tag, const std::int64_t (&extent)[Rank]) const {
    return take_scratch<T>(*workspace, tag, extent);
  }
  // Numbers of the host where ops read them: [row] and [row, kv_head].
  template <class T>
  const T* upload(const char* tag, const T* of_rows) const {
    return kvlab::upload(*workspace, tag, of_rows, {rows()}).data;
  }
  template <class T>
  View<const T, 2> upload_heads(const char* tag, const T* of_heads) const {
    return kvlab::upload(*workspace, tag, of_heads, {rows(), kv_heads()});
  }
  // Uninitialised ragged scratch: scores per KV head or per query head, and lists with room for `capacity` entries a
  // row.
  Scores kv_head_scores(const char* tag) const { return scratch<float>(tag, {rows(), kv_heads(), max_length}); }
  Scores query_head_scores(const char* tag) const {
    return scratch<float>(tag, {rows(), shape->query_heads, max_length});
  }
  template <class List>
  List list(const char* tag, std::int64_t capacity) const {
    List l;
    l.index = scratch<std::int32_t>(tag, {rows(), kv_heads(), capacity});
    l.count = scratch<std::int32_t>(tag, {rows(), kv_heads()});
    return l;
  }
};

// After the layer's attention over one chunk of the prompt of each row.
struct LayerPrefill : LayerKv {
  const bool* last = nullptr;  // [row] this chunk ends the prompt; host memory
};

// One decode step of one layer. In select: before attention, this step's token is already appended; in observe: after
// it.
struct LayerStep : LayerKv {
  Tensor<3> queries;                         // [row, query head, head_dim], after RoPE
  View<const std::int32_t, 2> page_budgets;  // [row, kv_head]
  int max_pages = 0;                         // of max_length tokens
  Tensor<3> output;                          // [row, query head, head_dim] attention output; observe only
};

// After the last layer of a decode step. The counters are host memory.
struct Step {
  const Shape* shape = nullptr;
  int rows = 0;
  const std::int32_t* slots = nullptr;
  const std::int32_t* position = nullptr;
  const std::int32_t* step = nullptr;
  Workspace* workspace = nullptr;
};

// The amount that an experiment gives a policy; exactly one of the three, or none (unlimited).
struct BudgetAmount {
  enum Kind : std::uint8_t { unlimited, tokens, ratio, bytes } kind = unlimited;
  double value =
      0;  // tokens per KV head | share of the tokens seen so far | device bytes per sequence, metadata included
};

// Most tokens per KV head that a sequence holds on each tier: at the end of its prompt and afterwards. -1 = all of
// them.
struct Demand {
  std::int64_t device_prefill = -1, device_decode = -1, host = 0;
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual Needs needs() const = 0;
  virtual Demand demand(int /*prompt_tokens*/, int /*max_new*/) const { return {}; }
  virtual CodecSpec codec() const { return {}; }            // of appended tokens
  virtual CodecSpec host_codec() const { return codec(); }  // of pages on the host tier
  virtual void attach(const Shape&, const BudgetAmount&, Workspace&) {}
  virtual void prefill(const LayerPrefill&, Edits&, Stream) {}  // once per layer and chunk, after its attention
  virtual void select(const LayerStep&, Edits&, Stream) {}   // before attention; no attend edit = everything resident
  virtual void observe(const LayerStep&, Edits&, Stream) {}  // after attention
  virtual void finish_step(const Step&, Edits&, Stream) {}   // after the last layer
  virtual void release(int /*slot*/) {}                      // a sequence ended; nothing may leak into the next one
};

}  // namespace kvlab
