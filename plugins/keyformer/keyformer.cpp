// Keyformer: attention accumulates as in H2O, but with Gumbel noise on the logits and a temperature that grows from
// step to step, because tokens that left took their share of attention with them. Adnan et al., MLSys 2024.
#include <kvlab/plugin.hpp>
#include <kvlab/random.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

using kvlab::View;

constexpr int block = 8;                                // queries of a prompt whose logits exist at once
constexpr std::int64_t starts = std::int64_t{1} << 18;  // of a query's noise in the table
constexpr std::int64_t head_step = 4099;                // from one head's noise to the next

class Keyformer final : public kvlab::Policy {
 public:
  explicit Keyformer(const kvlab::Params& p)
      : recent_(p.get<int>("recent")),
        every_(p.get<int>("every")),
        steps_(p.get<int>("steps")),
        tau_init_(p.get<double>("tau_init")),
        tau_end_(p.get<double>("tau_end")),
        seed_(p.get<std::uint64_t>("seed")),
        noise_(p.get<bool>("noise")) {
    if (tau_end_ < tau_init_)
      throw kvlab::Error(kvlab::Errc::config, "got tau_end " + std::to_string(tau_end_) +
                                                  ", wanted at least tau_init " + std::to_string(tau_init_) +
                                                  ": the temperature grows");
  }

  kvlab::Needs needs() const override { return kvlab::Needs{}.token_state("score").scratch_numbers(block + 4); }
  kvlab::Demand demand(int prompt, int max_new) const override {
    if (tokens_ == 0) return {};
    return {.device_prefill = std::min(prompt, tokens_),
            .device_decode = every_ == 0 ? -1 : std::min(prompt + max_new, tokens_ + every_)};
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount& budget, kvlab::Workspace& w) override {
    budget.require(1, "a token");
    tokens_ = budget.kind == kvlab::BudgetAmount::tokens ? static_cast<int>(budget.value) : 0;
    if (!noise_) return;
    kvlab::Random draws(seed_, 0);
    std::vector<float> table(
        static_cast<std::size_t>(starts + (shape.query_heads - 1) * head_step + shape.max_tokens + shape.page_size));
    for (float& x : table) x = static_cast<float>(-std::log(-std::log(draws.unit() + 0x1p-54)));
    table_ = static_cast<const float*>(w.constant("Gumbel noise", table.data(), table.size() * sizeof(float)));
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    const View<const float, 4> q = kv.chunk_queries.f32();
    const int n = static_cast<int>(q.extent[2]);
    const Room room(kv, std::min(block, n));
    for (int i = 0; i < n; i += block)
      add(kv, room, 0,
          {q.data + i * q.stride[2], {q.extent[1], std::min(block, n - i), q.extent[3]}, {q.stride[1], q.stride[2], 1}},
          n - i, tau_init_, s);
    if (kv.last[0]) shrink(kv, {true}, edits, s);
  }

  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    const View<const float, 3> q = step.queries.f32();
    std::vector<bool> due;
    const Room room(step, 1);
    for (int row = 0; row < step.rows(); ++row) {
      const double part = static_cast<double>(std::min(step.step[row] + 1, steps_)) / steps_;
      add(step, room, row, {q.data + row * q.stride[0], {q.extent[1], 1, q.extent[2]}, {q.stride[1], 0, 1}}, 1,
          tau_init_ + (tau_end_ - tau_init_) * part, s);
      due.push_back(every_ > 0 && (step.step[row] + 1) % every_ == 0);
    }
    shrink(step, due, edits, s);
  }

 private:
  // Scratch of a callback, for one block of queries after the other.
  struct Room {
    Room(const kvlab::LayerKv& kv, int queries)
        : vectors(kv.scratch<float>("queries", {kv.shape->query_heads, queries, kv.pages.head_dim})),
          shares(kv.scratch<float>("shares", {1, std::int64_t{kv.shape->query_heads} * queries, kv.max_length})),
          sum(kv.scratch<float>("sum", {1, kv.kv_heads(), kv.max_length})) {}
    View<float, 3> vectors, shares, sum;
  };

  // Adds the noisy attention of queries [query head, i, head_dim] to a row's scores, mean over the group. The first of
  // them is the query of the token that is the `newest`-th newest of the text.
  void add(const kvlab::LayerKv& kv, const Room& room, int row, View<const float, 3> queries, int newest, double tau,
           kvlab::Stream s) const {
    kvlab::PagedKv one = kv.pages;
    one.slots += row, one.rows = 1;
    const std::int64_t heads = queries.extent[0], count = queries.extent[1], dim = queries.extent[2];
    const auto vectors = View<float, 3>::dense(room.vectors.data, {heads, count, dim});
    const auto shares = View<float, 3>::dense(room.shares.data, {1, heads * count, kv.max_length});
    kvlab::ops::copy(vectors, queries, s);
    kvlab::ops::row_dot({&one, kvlab::KvSide::key}, View<const float, 3>::dense(vectors.data, {1, heads * count, dim}),
                        shares, s);
    kvlab::ops::scale(shares, 1 / std::sqrt(static_cast<float>(dim)), s);
    for (int i = 0; i < count; ++i) {
      const kvlab::Scores of_query{
          shares.data + i * shares.stride[1], {1, heads, kv.max_length}, {0, count * shares.stride[1], 1}};
      if (noise_) kvlab::ops::add(of_query, noise(kv, row, kv.position[row] - newest + i, heads), 1, s);
      kvlab::ops::set_pinned(one, {.last = newest - 1 - i}, -INFINITY, of_query, s);
    }
    kvlab::ops::softmax(one, shares, static_cast<float>(tau), s);
    kvlab::ops::group_reduce(one, shares, kvlab::GroupRule::sum, room.sum, s);
    kvlab::ops::blend_state({&one, kv.state("score").column}, 1, room.sum, 1 / static_cast<float>(kv.shape->group()),
                            s);
  }

  // The noise of one query: [1, query head, place]. Where it starts in the table follows from the sequence, the layer
  // and the query's text position.
  View<const float, 3> noise(const kvlab::LayerKv& kv, int row, int position, std::int64_t heads) const {
    const std::uint64_t sequence = kvlab::Random(seed_, kv.sequence[row] + std::uint64_t{1}).next();
    kvlab::Random of_query(sequence, static_cast<std::uint64_t>(position) << 32 | static_cast<std::uint32_t>(kv.layer));
    return {table_ + of_query.below(starts), {1, heads, kv.max_length}, {0, head_step, 1}};
  }

  // Evicts in the rows that are due and above their budget.
  void shrink(const kvlab::LayerKv& kv, const std::vector<bool>& due, kvlab::Edits& edits, kvlab::Stream s) const {
    const auto rows = static_cast<std::size_t>(kv.rows()), heads = static_cast<std::size_t>(kv.kv_heads());
    std::vector<std::int32_t> keep(rows * heads, std::numeric_limits<std::int32_t>::max());
    std::vector<kvlab::Pins> pins(rows);
    bool any = false;
    for (std::size_t row = 0; row < rows; ++row) {
      const int tokens = kv.budget_tokens(static_cast<int>(row));
      if (!due[row] || kv.position[row] <= tokens) continue;
      std::fill_n(keep.begin() + static_cast<std::ptrdiff_t>(heads * row), heads, tokens);
      pins[row].last = static_cast<int>(std::int64_t{tokens} * recent_ / 100);
      any = true;
    }
    if (!any) return;
    const kvlab::Scores scores = kv.kv_head_scores("scores");
    kvlab::ops::read_state(kv.state("score"), scores, s);
    const auto kept = kv.list<kvlab::TokenList>("kept", kv.max_length);
    kvlab::ops::top_tokens(kv.pages, scores, kv.upload_heads("keep", keep.data()), kv.upload("pins", pins.data()), kept,
                           s);
    edits.evict_rest(kept);
  }

  int recent_, every_, steps_, tokens_ = 0;
  double tau_init_, tau_end_;
  std::uint64_t seed_;
  bool noise_;
  const float* table_ = nullptr;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<Keyformer>("keyformer",
                             "keeps what attention with noise and a growing temperature adds up to (Adnan et al. 2024)")
        .param("recent", 30, 0, 100, "newest tokens that are always kept, in percent of the budget")
        .param("tau_init", 1., 1e-3, 1e3, "temperature of the prompt's attention, as scores see it")
        .param("tau_end", 2., 1e-3, 1e3,
               "temperature after `steps` decode steps, and from then on; as tau_init = it stays")
        .param("steps", 100, 1, kvlab::any,
               "decode steps in which the temperature grows, so the answer's planned length")
        .param("every", 1, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only")
        .param("seed", std::uint64_t{1}, 0, kvlab::any, "of the noise")
        .component("noise", "Gumbel noise on each logit; off = attention itself, as H2O adds it up"))
