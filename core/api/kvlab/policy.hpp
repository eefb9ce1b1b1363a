// The whole life cycle of a compression policy. Most methods are smaller: see roles.hpp (Scorer, Budget, Codec,
// Selector).
//
// One callback covers all sequences of the batch ("rows") and all KV heads of one layer. Views are borrowed for the
// call. A policy holds no pages and copies none: it returns Edits.
//
// Plain arrays are host memory: slots, text positions, steps, which prompts end. Every view (tables, lengths, scores,
// lists, scratch) is memory of the stream's device. On a GPU the host may neither read nor write a view: ops do.
// upload() copies numbers of the host to where ops read them.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "kvlab/edits.hpp"
#include "kvlab/error.hpp"
#include "kvlab/kv.hpp"
#include "kvlab/profile.hpp"
#include "kvlab/prompt_mask.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

// Which attention probabilities a policy wants. `decode`: each decode step's row, which sums to 1 per query head.
// `all`: the prompt's too, summed over the queries of each chunk; prompt attention then passes over its scores twice.
// (ops::window_votes computes the attention of the prompt's last queries from window_queries.) observe gets a step's
// mass. select does not, because it does not exist before attention. Tokens that attention did not read have mass 0.
enum class Mass : std::uint8_t { none, decode, all };

// Token state that core adds attention mass to, that of a group's query heads reduced by `rule`.
struct MassState {
  std::string state;
  GroupRule rule = GroupRule::mean;
  Mass when = Mass::none;
};

// Requests of a policy to core, which checks them once, before any work. An unmet need is an error: core never falls
// back to full attention.
class Needs {
 public:
  // The last n prompt queries, after RoPE, or all of a shorter prompt. A chunked prompt costs a copy of
  // n x query heads x head_dim f32 for each layer and slot; a whole one costs nothing.
  Needs& window_queries(int n) { return window_queries_ = n, *this; }
  Needs& mass(Mass m) { return mass_ = m, *this; }  // attention mass [row, query head, token]
  // Declares token state. Core adds each attention's mass to it, before the callbacks that follow. A GPU then passes
  // over the scores once less than mass() and ops::add_mass do. Not together with mass(): Errc::plugin.
  Needs& mass_into(std::string name, GroupRule rule, Mass when) {
    mass_into_ = {name, rule, when};
    return token_state(std::move(name));
  }
  // Per page, kept up to date by append and evict. bits: 16, in the run's dtype, or 8, in codes; else Errc::config.
  Needs& page_summary(Summary s, int bits = 16) {
    if (bits != 16 && bits != 8)
      throw Error(Errc::config, "got page summaries of " + std::to_string(bits) + " bits, wanted 16 or 8");
    summary_bits_ = bits;
    return summary_ = s, *this;
  }
  Needs& dense_layers(int n) { return dense_layers_ = n, *this; }  // first layers that are never selected or evicted
  Needs& min_pages(int n) { return min_pages_ = n, *this; }        // least pages that a Selector attends to
  Needs& rope(RopeRegime r) { return rope_ = r, *this; }
  Needs& token_state(std::string name) { return state_.push_back(std::move(name)), *this; }  // f32, starts at 0
  Needs& chunked_prompts(bool allowed) { return chunked_ = allowed, *this; }
  // A promise that a GPU may replay the decode steps' callbacks as a graph (core/api/README.md). Core asks for it again
  // after attach. A policy that uploads numbers of a budget in ratio or bytes promises it for a budget in tokens alone.
  Needs& capturable(bool yes) { return capturable_ = yes, *this; }
  // The only devices that it runs on, and the only element types of the cache that it reads. The default is all.
  Needs& devices(std::vector<Device> only) { return devices_ = std::move(only), *this; }
  Needs& dtypes(std::vector<DType> only) { return dtypes_ = std::move(only), *this; }
  // The policy places pages on the host (Edits::place). Core then takes the host tier at the start of the run.
  Needs& host_pages(bool yes) { return host_pages_ = yes, *this; }
  // The policy keeps copies of heads on the host (Edits::archive). Core then takes the host tier at the start of the
  // run. Goes with neither host_pages, page_summary, RopeRegime::re_rotate nor another codec on the host:
  // Errc::unsupported. Such a policy offloads no pages.
  Needs& archive(bool yes) { return archive_ = yes, *this; }
  Needs& pauses(bool yes) { return pauses_ = yes, *this; }  // Deadline::sequence; with host_pages
  Needs& steps(bool yes) { return steps_ = yes, *this; }    // LayerKv::steps
  // LayerKv::text. It costs 4 bytes for each text token of a slot, and a byte for each id of the vocabulary.
  Needs& token_ids(bool yes) { return token_ids_ = yes, *this; }
  // Most scratch of a callback, in numbers for each token and query head of the batch (workspace.hpp).
  Needs& scratch_numbers(int n) { return scratch_numbers_ = n, *this; }
  // observe reads neither mass nor output and gives no edits but `place` and `fetch`. It may read logits that attention
  // left (Edits::keep_logits). A GPU then runs it beside the rest of the step, or for all layers at its end. The next
  // step's callbacks see all that it wrote; this step's see nothing. Scores that it takes from score_pages are scratch.
  // All else that it writes, and the lists of its edits, are scratch or memory of the layer alone: work of several
  // layers may run at once.
  Needs& observe_beside(bool yes) { return observe_beside_ = yes, *this; }
  // All KV heads of a layer must hold the same text positions. A split that gives them different numbers is refused.
  Needs& uniform_heads(bool yes) { return uniform_heads_ = yes, *this; }
  Needs& all_layers(bool yes) { return all_layers_ = yes, *this; }  // Step::pages
  // On a GPU the CPU's threads plan store_as edits and encodes to the second codec, where kernels do otherwise. Lists
  // and counters cross, and the host waits for the device, so no graph holds such steps. It is for comparisons.
  Needs& planned_on_host(bool yes) { return planned_on_host_ = yes, *this; }
  // The policy decides by itself how many tokens a head keeps. It then takes no budget: Errc::config.
  Needs& own_amount(bool yes) { return own_amount_ = yes, *this; }
  // The policy knows what no method can know in time, so it is the reference for those of its kind. Its rows carry the
  // label `oracle`, and core measures no times of it.
  Needs& oracle(bool yes) { return oracle_ = yes, *this; }
  // LayerKv::future_mass: core first runs the full cache on the same prompts. Such a policy is an oracle. It runs in
  // the cells of an experiment without a workload, and nowhere else: Errc::config.
  Needs& future_mass(bool yes) { return future_mass_ = yes, *this; }
  Needs& output_projection(bool yes) { return output_projection_ = yes, *this; }  // LayerKv::projected_norms
  // LayerStep::next_queries. With observe_beside it is Errc::plugin, and so is a regime but RopeRegime::original.
  Needs& next_queries(bool yes) { return next_queries_ = yes, *this; }
  // Policy::finish_prompt.
  Needs& finish_prompt(bool yes) { return finish_prompt_ = yes, *this; }
  // The policy changes stored keys or values (Edits::rewrite), as a method's own format would. Bytes and times stay
  // those of the full-width cache and of what the method keeps beside it. Its rows carry the label `functional`. A
  // callback gets scratch for the keys and values of a sequence's layer, too. Other regimes than RopeRegime::original,
  // codes and archives are Errc::unsupported.
  Needs& functional(bool yes) { return functional_ = yes, *this; }
  // The policy keeps factors of its keys on the device, and its place edits may name them (Placing::keys). It may
  // rewrite keys to those that the factors give, under the conditions of functional, but without the label: its pages
  // lie on the host. Without host_pages it is Errc::unsupported.
  Needs& rebuilds_keys(bool yes) { return rebuilds_keys_ = yes, *this; }
  Needs& prompt_lse(bool yes) { return prompt_lse_ = yes, *this; }  // LayerPrefill::lse
  // The arrays of a profile file, which the experiment names. They come through load_profile.
  Needs& profile(bool yes) { return profile_ = yes, *this; }

  int window_queries() const { return window_queries_; }
  Mass mass() const { return mass_; }
  const MassState& mass_into() const { return mass_into_; }
  Mass any_mass() const { return mass_ > mass_into_.when ? mass_ : mass_into_.when; }  // in either form
  Summary page_summary() const { return summary_; }
  int summary_bits() const { return summary_bits_; }
  int dense_layers() const { return dense_layers_; }
  int min_pages() const { return min_pages_; }
  RopeRegime rope() const { return rope_; }
  const std::vector<std::string>& token_state() const { return state_; }
  bool chunked_prompts() const { return chunked_; }
  bool capturable() const { return capturable_ && !planned_on_host_; }
  const std::vector<Device>& devices() const { return devices_; }
  const std::vector<DType>& dtypes() const { return dtypes_; }
  bool observe_beside() const { return observe_beside_; }
  bool uniform_heads() const { return uniform_heads_; }
  bool all_layers() const { return all_layers_; }
  bool planned_on_host() const { return planned_on_host_; }
  bool own_amount() const { return own_amount_; }
  bool oracle() const { return oracle_ || future_mass_; }
  bool future_mass() const { return future_mass_; }
  bool profile() const { return profile_; }
  bool output_projection() const { return output_projection_; }
  bool next_queries() const { return next_queries_; }
  bool finish_prompt() const { return finish_prompt_; }
  bool functional() const { return functional_; }
  bool rebuilds_keys() const { return rebuilds_keys_; }
  bool prompt_lse() const { return prompt_lse_; }
  bool host_pages() const { return host_pages_; }
  bool archive() const { return archive_; }
  bool pauses() const { return pauses_; }
  bool steps() const { return steps_; }
  bool token_ids() const { return token_ids_; }
  int scratch_numbers() const { return scratch_numbers_; }

 private:
  int window_queries_ = 0;
  Mass mass_ = Mass::none;
  MassState mass_into_;
  Summary summary_ = Summary::none;
  int summary_bits_ = 16;
  int dense_layers_ = 0;
  int min_pages_ = 0;
  RopeRegime rope_ = RopeRegime::original;
  std::vector<std::string> state_;
  bool chunked_ = true;
  bool capturable_ = false;
  std::vector<Device> devices_;
  std::vector<DType> dtypes_;
  bool observe_beside_ = false;
  bool uniform_heads_ = false;
  bool all_layers_ = false;
  bool planned_on_host_ = false;
  bool own_amount_ = false;
  bool oracle_ = false;
  bool future_mass_ = false;
  bool profile_ = false;
  bool output_projection_ = false;
  bool next_queries_ = false;
  bool finish_prompt_ = false;
  bool host_pages_ = false;
  bool archive_ = false;
  bool pauses_ = false;
  bool steps_ = false;
  bool token_ids_ = false;
  bool functional_ = false;
  bool rebuilds_keys_ = false;
  bool prompt_lse_ = false;
  int scratch_numbers_ = 4;
};

// The column of that name among those that needs() declares.
inline StateColumn column_of(const PagedKv& kv, const std::vector<std::string>& names, const std::string& name) {
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return {&kv, static_cast<int>(i)};
  throw Error(Errc::plugin, "got token state '" + name + "', wanted one that needs() declares");
}

// A list in scratch memory with room for `capacity` entries of each head.
template <class List>
List take_list(Workspace& w, const char* tag, int rows, int kv_heads, std::int64_t capacity) {
  List l;
  l.index = take_scratch<std::int32_t>(w, tag, {rows, kv_heads, capacity});
  l.count = take_scratch<std::int32_t>(w, tag, {rows, kv_heads});
  return l;
}

struct LayerKv;

// Core's own: what LayerKv::future_mass asks.
class FutureMass {
 public:
  virtual ~FutureMass() = default;
  virtual View<const float, 3> of(const LayerKv& kv) const = 0;
};

// Core's own: what LayerKv::projected_norms asks.
class OutputProjection {
 public:
  virtual ~OutputProjection() = default;
  virtual void norms(const LayerKv& kv, Scores out, Stream s) const = 0;
};

struct LayerStep;

// Core's own: what LayerStep::next_queries asks.
class QueriesAhead {
 public:
  virtual ~QueriesAhead() = default;
  virtual void of(const LayerStep& step, View<float, 3> out, Stream s) const = 0;
};

// The cache of one layer during a callback.
struct LayerKv {
  int layer = 0;
  const Shape* shape = nullptr;  // host memory, like state_names
  PagedKv pages;
  PagedKv host_pages;  // the same tokens, host tier (base and table differ)
  KvRows keys, values;
  Summaries summaries;
  // [row, query head, w, head_dim], oldest first; only at the prompt's end. A short prompt has fewer than needs() asks.
  Tensor<4> window_queries;
  // The queries of this prompt chunk, after RoPE: [row, query head, i, head_dim], oldest first; the last one's text
  // position is position[row] - 1. Empty while decoding.
  Tensor<4> chunk_queries;
  Tensor<3> queries;  // [row, query head, head_dim] of the decode step, after RoPE; empty in prompts
  // [row, query head, token] by place in the cache, like Scores. Empty in select, unless needs() asks for it, and after
  // a prompt chunk under Mass::decode.
  View<const float, 3> mass;
  const std::vector<std::string>* state_names = nullptr;
  Workspace* workspace = nullptr;
  const std::int32_t* slots = nullptr;     // [row] host memory, like position and step; ops read pages.slots
  const std::int32_t* position = nullptr;  // [row] text tokens seen so far (the true position counter)
  // [row] decode steps of this sequence before this one, 0 while prefilling. A question's tokens count if they are fed
  // as decode steps. A question that follows an answer counts on. A question that starts from a saved cache continues
  // the saved number.
  const std::int32_t* step = nullptr;
  const std::int32_t* budget = nullptr;  // [row] see budget_tokens
  // [row] the sequence's number, which its sample determines; host memory. Random choices follow it, never the slot.
  const std::uint32_t* sequence = nullptr;
  // [slot] number of the question that the slot's decode steps belong to; memory of the stream's device, always at the
  // same address. Ops read it there, because it may change while a graph replays steps and the host runs no callback.
  const std::uint32_t* question = nullptr;
  // [slot] the numbers of `step` for ops, if needs() asks for them; memory of the stream's device, at one address. Only
  // decode steps write it.
  const std::int32_t* steps = nullptr;
  TextTokens text;                     // if needs() asks for token ids
  int max_length = 0;                  // no head of this layer and batch holds more tokens
  const FutureMass* future = nullptr;  // core's own, like projection
  const OutputProjection* projection = nullptr;

  int rows() const { return pages.rows; }
  int kv_heads() const { return pages.kv_heads; }
  // Tokens per KV head that the run's budget allows the row in this layer, after position[row] tokens of text; the
  // largest int when the budget is unlimited or the layer is dense. A budget in bytes pays for state and the dense
  // layers first and gives whole pages. attach must refuse a budget below the tokens that the policy always keeps.
  int budget_tokens(int row) const { return budget[row]; }
  StateColumn state(const std::string& name) const { return column_of(*keys.kv, *state_names, name); }
  template <class T, std::size_t Rank>
  View<T, static_cast<int>(Rank)> scratch(const char* tag, const std::int64_t (&extent)[Rank]) const {
    return take_scratch<T>(*workspace, tag, extent);
  }
  // [row, kv_head, token] scratch, like Scores, if needs() asks for it: the attention mass that the decode steps after
  // this one give each token, summed over the steps, mean over the group. It is the mass of the full cache in a
  // run that core made before. A prompt's callback sees all steps of its answer, a question that is fed included; of a
  // context that several questions share, the steps of them all. Tokens and steps that the recorded run did not have
  // give 0. That run has the full cache's own answer, so a sequence whose answer differs sees the future of another
  // text.
  View<const float, 3> future_mass() const {
    if (!future) throw Error(Errc::plugin, "got future_mass() in a callback, wanted needs() to ask for it");
    return future->of(*this);
  }
  // out[row, kv_head, token] = mean over the group's query heads h of ||W_h v||_1, if needs() asks for it. v is the
  // token's value as the cache decodes it. W_h are the columns of the layer's output projection that are head h's. The
  // projection's bias counts for nothing. The cost is that of the projection of every cached token, once per query
  // head.
  void projected_norms(Scores out, Stream s) const {
    if (!projection) throw Error(Errc::plugin, "got projected_norms() in a callback, wanted needs() to ask for it");
    projection->norms(*this, out, s);
  }
  // Copies numbers of the host to where ops read them: [row], and [row, kv_head].
  template <class T>
  const T* upload(const char* tag, const T* of_rows) const {
    return kvlab::upload(*workspace, tag, of_rows, {rows()}).data;
  }
  template <class T>
  View<const T, 2> upload_heads(const char* tag, const T* of_heads) const {
    return kvlab::upload(*workspace, tag, of_heads, {rows(), kv_heads()});
  }
  // Uninitialised scratch: a vector of head_dim for each head, ragged scores, and lists with room for `capacity`
  // entries a row.
  View<float, 3> kv_head_vectors(const char* tag) const {
    return scratch<float>(tag, {rows(), kv_heads(), pages.head_dim});
  }
  View<float, 3> query_head_vectors(const char* tag) const {
    return scratch<float>(tag, {rows(), shape->query_heads, pages.head_dim});
  }
  Scores kv_head_scores(const char* tag) const { return scratch<float>(tag, {rows(), kv_heads(), max_length}); }
  Scores query_head_scores(const char* tag) const {
    return scratch<float>(tag, {rows(), shape->query_heads, max_length});
  }
  template <class List>
  List list(const char* tag, std::int64_t capacity) const {
    return take_list<List>(*workspace, tag, rows(), kv_heads(), capacity);
  }
};

// After the layer's attention over one chunk of a prompt. Each sequence's prompt comes in calls of its own, with one
// row, so no chunk and no window of queries is ragged.
struct LayerPrefill : LayerKv {
  const bool* last = nullptr;  // [row] this chunk ends the prompt; host memory
  // [row, query head, i] of chunk_queries, if needs() asks for it. It is the natural logarithm of the softmax's sum: of
  // exp(q . k_j / sqrt(D)) over all tokens that the query sees. Attention leaves it at no cost where its kernels are
  // those of plain 16-bit pages on a GPU. Elsewhere it is empty.
  View<const float, 3> lse;

  // The queries of the chunk's last token, like LayerKv::queries.
  Tensor<3> last_queries() const {
    const View<const float, 4> q = chunk_queries.f32();
    return View<const float, 3>{q.data + (q.extent[2] - 1) * q.stride[2],
                                {q.extent[0], q.extent[1], q.extent[3]},
                                {q.stride[0], q.stride[1], q.stride[3]}};
  }
};

// One decode step of one layer. select runs before attention, with this step's token already appended. observe runs
// after attention.
struct LayerStep : LayerKv {
  // [row, kv_head] pages to attend to. Core fills it for Selector::select alone; it is empty in every other callback.
  // A Policy computes its own by ops::budget_pages (kvlab/ops.hpp).
  View<const std::int32_t, 2> page_budgets;
  int max_pages = 0;                     // of max_length tokens
  Tensor<3> output;                      // [row, query head, head_dim] attention output; observe only
  ops::FinalList* final_list = nullptr;  // core's own: for the list that select attends to
  const QueriesAhead* ahead = nullptr;   // core's own, like projection

  // out[row, query head, d] = the queries that the next layer would have for this layer's attention input, if needs()
  // asks for it. That is x behind this layer's input norm, times the next layer's query weights, with its bias, its
  // query norm and RoPE at the token's text position. out: dense. The last layer has none: Errc::plugin. A graph may
  // hold the call. A GPU projects queries alone, and multiplies 16-bit numbers as it does for a layer's own. The CPU
  // projects keys and values, too.
  void next_queries(View<float, 3> out, Stream s) const {
    if (!ahead) throw Error(Errc::plugin, "got next_queries() in a callback, wanted needs() to ask for it");
    ahead->of(*this, out, s);
  }
};

struct Step;

// Numbers that last: a policy takes them in attach, and core saves, restores and clears them with the sequence. Lists
// start empty, numbers at 0. `of` gives those of a callback's layer, or of all layers in finish_step.
template <class List>
class KeptLists {
 public:
  KeptLists() = default;
  // Room for `capacity` entries of a KV head.
  KeptLists(const char* tag, const Shape& s, std::int64_t capacity, Workspace& w) {
    const std::int64_t heads = std::int64_t{s.layers} * s.kv_heads, slot = heads * (capacity + 1);
    auto* data = static_cast<std::int32_t*>(w.state(tag, static_cast<std::size_t>(slot) * 4, s.max_slots));
    for (int l = 0; l < s.layers; ++l) {
      const std::int64_t first = std::int64_t{l} * s.kv_heads;
      List list;
      list.index = {data + heads + first * capacity, {s.max_slots, s.kv_heads, capacity}, {slot, capacity, 1}};
      list.count = {data + first, {s.max_slots, s.kv_heads}, {slot, 1}};
      layers_.push_back(list);
    }
  }
  List of(const LayerKv& kv) const {
    List list = layers_[static_cast<std::size_t>(kv.layer)];
    list.slots = kv.pages.slots;
    return list;
  }

 private:
  std::vector<List> layers_;
};
using KeptPages = KeptLists<PageList>;
using KeptTokens = KeptLists<TokenList>;

// A vector of head_dim for each query head: [slot, query head, head_dim] of a layer.
class KeptQueries {
 public:
  KeptQueries() = default;
  KeptQueries(const char* tag, const Shape& s, Workspace& w) {
    const std::int64_t layer = std::int64_t{s.query_heads} * s.head_dim, slot = layer * s.layers;
    auto* data = static_cast<float*>(w.state(tag, static_cast<std::size_t>(slot) * sizeof(float), s.max_slots));
    for (int l = 0; l < s.layers; ++l)
      layers_.push_back({data + l * layer, {s.max_slots, s.query_heads, s.head_dim}, {slot, s.head_dim, 1}});
  }
  View<float, 3> of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }

 private:
  std::vector<View<float, 3>> layers_;
};

// Some numbers for each KV head: [slot, kv_head, i] of a layer.
class KeptSeries {
 public:
  KeptSeries() = default;
  KeptSeries(const char* tag, const Shape& s, int count, Workspace& w) {
    const std::int64_t layer = std::int64_t{count} * s.kv_heads, slot = layer * s.layers;
    auto* data = static_cast<float*>(w.state(tag, static_cast<std::size_t>(slot) * sizeof(float), s.max_slots));
    for (int l = 0; l < s.layers; ++l)
      layers_.push_back({data + l * layer, {s.max_slots, s.kv_heads, count}, {slot, count, 1}});
  }
  View<float, 3> of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }

 private:
  std::vector<View<float, 3>> layers_;
};

// `count` made-up tokens for each KV head. At first there are none: all weights are 0.
class KeptMadeUp {
 public:
  KeptMadeUp() = default;
  KeptMadeUp(const char* tag, const Shape& s, int count, Workspace& w) {
    const std::int64_t dim = s.head_dim, of_layer = std::int64_t{s.kv_heads} * count, all = of_layer * s.layers,
                       slot = all * (2 * dim + 1);
    auto* data = static_cast<float*>(w.state(tag, static_cast<std::size_t>(slot) * sizeof(float), s.max_slots));
    const std::array<std::int64_t, 4> extent{s.max_slots, s.kv_heads, count, dim}, stride{slot, count * dim, dim, 1};
    for (std::int64_t at = 0; at < all; at += of_layer)
      layers_.push_back({{data + at * dim, extent, stride},
                         {data + (all + at) * dim, extent, stride},
                         {data + 2 * all * dim + at, {s.max_slots, s.kv_heads, count}, {slot, count, 1}}});
  }
  MadeUpTokens of(const LayerKv& kv) const {
    return layers_.empty() ? MadeUpTokens{} : layers_[static_cast<std::size_t>(kv.layer)];
  }

 private:
  std::vector<MadeUpTokens> layers_;
};

// A mark or a number for each KV head: [slot, kv_head] of a layer.
template <class T>
class KeptOfHeads {
 public:
  KeptOfHeads() = default;
  KeptOfHeads(const char* tag, const Shape& s, Workspace& w) {
    const std::int64_t slot = std::int64_t{s.layers} * s.kv_heads;
    auto* data = static_cast<T*>(w.state(tag, static_cast<std::size_t>(slot) * sizeof(T), s.max_slots));
    for (int l = 0; l < s.layers; ++l)
      layers_.push_back({data + std::int64_t{l} * s.kv_heads, {s.max_slots, s.kv_heads}, {slot, 1}});
  }
  View<T, 2> of(const LayerKv& kv) const { return layers_[static_cast<std::size_t>(kv.layer)]; }
  // [row, kv_head] of a prompt, which has one row: for ops that write numbers of rows.
  View<T, 2> of_row(const LayerPrefill& kv) const {
    View<T, 2> row = of(kv);
    row.data += kv.slots[0] * row.stride[0];
    row.extent[0] = 1;
    return row;
  }

 private:
  std::vector<View<T, 2>> layers_;
};
using KeptFlags = KeptOfHeads<std::uint8_t>;

// A whole number for each KV head.
class KeptNumbers {
 public:
  KeptNumbers() = default;
  KeptNumbers(const char* tag, const Shape& s, Workspace& w) {
    const std::int64_t slot = std::int64_t{s.layers} * s.kv_heads;
    all_ = {static_cast<std::int32_t*>(w.state(tag, static_cast<std::size_t>(slot) * 4, s.max_slots)),
            {s.layers, s.max_slots, s.kv_heads},
            {s.kv_heads, slot, 1}};
  }
  HeadNumbers of(const LayerKv& kv) const {
    HeadNumbers one = all_;
    one.data += kv.layer * one.stride[0];
    one.extent[0] = 1;
    return one;
  }
  HeadNumbers of(const Step&) const { return all_; }

 private:
  HeadNumbers all_;
};

// A number for each KV head that is a constant of the run. Takes [layer][kv_head] in attach.
template <class T>
class HeadConstants {
 public:
  HeadConstants() = default;
  HeadConstants(const char* tag, const Shape& s, const std::vector<T>& of_heads, Workspace& w)
      : data_(static_cast<const T*>(w.constant(tag, of_heads.data(), of_heads.size() * sizeof(T)))),
        kv_heads_(s.kv_heads) {}
  const T* of(const LayerKv& kv) const { return data_ ? data_ + std::int64_t{kv.layer} * kv_heads_ : nullptr; }

 private:
  const T* data_ = nullptr;
  int kv_heads_ = 0;
};
using HeadClass = HeadConstants<std::uint8_t>;   // a class of KV heads: marks 0 or 1
using HeadOfHead = HeadConstants<std::int32_t>;  // a KV head of the layer for each KV head, or -1

// After the last layer of a decode step. The arrays slots, position and step are host memory, [row].
struct Step {
  const Shape* shape = nullptr;
  int rows = 0;
  const std::int32_t* slots = nullptr;
  const std::int32_t* position = nullptr;
  const std::int32_t* step = nullptr;
  Workspace* workspace = nullptr;
  // All layers as rows of one cache, if needs() asks for it: row l * rows + r is row r of layer l. Its slots are
  // l * max_slots + slot. Ops take it like a layer's cache. Edits::for_all_layers takes lists of these rows.
  PagedKv pages;
  int max_length = 0;  // no head of these rows holds more tokens
  const std::vector<std::string>* state_names = nullptr;

  StateColumn state(const std::string& name) const { return column_of(pages, *state_names, name); }
  template <class List>
  List list(const char* tag, std::int64_t capacity) const {
    return take_list<List>(*workspace, tag, pages.rows, pages.kv_heads, capacity);
  }
};

// The amount that an experiment gives a policy; exactly one of the three, or none (unlimited).
struct BudgetAmount {
  enum Kind : std::uint8_t { unlimited, tokens, ratio, bytes } kind = unlimited;
  double value =
      0;  // tokens per KV head | share of the tokens seen so far | device bytes per sequence, metadata included

  // Refuses a number of tokens below `least`, the tokens of `what`.
  void require(int least, const char* what) const {
    if (kind == tokens && value < least)
      throw Error(Errc::config, "got a budget of " + std::to_string(static_cast<int>(value)) +
                                    " tokens, wanted at least " + std::to_string(least) + ": " + what);
  }
};

// Most tokens per KV head that a sequence holds. A workload rounds them up to whole pages and admits sequences by them.
// A wrong number costs time only. -1 = the policy does not say.
struct Demand {
  std::int64_t device_prefill = -1;  // on the device at the end of its prompt; -1 = all of them
  std::int64_t device_decode = -1;   // on the device after decode steps; -1 = it grows by each token
  std::int64_t host = -1;            // on the host; -1 = what earlier prompts took there
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual Needs needs() const = 0;
  // max_new: most tokens of decode steps after the prompt.
  virtual Demand demand(int /*prompt_tokens*/, int /*max_new*/) const { return {}; }
  // How pages may store tokens: one or two codecs. Appended tokens take the first. Pages take the second by
  // Edits::encode and Edits::store_as. Two do not go with pages on the host.
  virtual std::vector<CodecSpec> codecs() const { return {CodecSpec{}}; }
  virtual CodecSpec host_codec() const { return codecs().front(); }  // of pages on the host tier
  // Core calls it once before attach where needs() asks for a profile. Core has checked that the profile is of this
  // model and that its arrays have the model's layers and heads. An array that is not there: std::out_of_range.
  virtual void load_profile(const Profile&) {}
  virtual void attach(const Shape&, const BudgetAmount&, Workspace&) {}
  // [layer, KV head] what the tokens of every prompt attend to. Empty: all tokens before them. Core asks once, after
  // attach. Decode steps have no mask: they attend to what is resident.
  virtual std::vector<PromptMask> prompt_masks() const { return {}; }
  virtual void prefill(const LayerPrefill&, Edits&, Stream) {}  // once per layer and chunk, after its attention
  // If needs() asks for it: once per layer, the first one first, after the last layer of a prompt's last chunk. All
  // layers then hold the whole prompt. `kv` has no queries and no mass. The host may wait for the stream here.
  virtual void finish_prompt(const LayerKv&, Edits&, Stream) {}
  virtual void select(const LayerStep&, Edits&, Stream) {}   // before attention; no attend edit = everything resident
  virtual void observe(const LayerStep&, Edits&, Stream) {}  // after attention
  virtual void finish_step(const Step&, Edits&, Stream) {}   // after the last layer
  virtual void release(int /*slot*/) {}                      // a sequence ended; nothing may leak into the next one
};

}  // namespace kvlab
