// Keyformer: attention accumulates as in H2O, but with Gumbel noise on the logits and a temperature that grows from
// step to step, because tokens that left took their share of attention with them. Adnan et al., MLSys 2024.
#include <kvlab/plugin.hpp>
#include <kvlab/random.hpp>

#include <algorithm>
#include <cmath>

namespace {

using kvlab::View;

constexpr int block = 8;  // queries of a prompt whose logits exist at once

class Keyformer final : public kvlab::Scorer {
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

  kvlab::Needs needs() const override { return kvlab::Needs{}.token_state("score").scratch_numbers(2 * block + 12); }
  kvlab::Pins pins(int tokens) const override {
    return {.last = static_cast<int>(std::int64_t{tokens} * recent_ / 100)};
  }
  const char* column() const override { return "score"; }
  int every() const override { return every_; }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::read_state(kv.state("score"), out, s);
  }

  void observe(const kvlab::LayerKv& kv, kvlab::Stream s) override {
    if (kv.queries) {
      const View<const float, 3> q = kv.queries.f32();
      const Room room(kv, 1, noise_ ? kv.rows() : 0);
      for (int row = 0; row < kv.rows(); ++row) {
        const double part = static_cast<double>(std::min(kv.step[row] + 1, steps_)) / steps_;
        add(kv, room, row, {q.data + row * q.stride[0], {q.extent[1], 1, q.extent[2]}, {q.stride[1], 0, 1}}, 1,
            tau_init_ + (tau_end_ - tau_init_) * part, s);
      }
      return;
    }
    const View<const float, 4> q = kv.chunk_queries.f32();
    const int n = static_cast<int>(q.extent[2]);
    const Room room(kv, std::min(block, n), noise_ ? (n + block - 1) / block : 0);
    for (int i = 0; i < n; i += block)
      add(kv, room, 0,
          {q.data + i * q.stride[2], {q.extent[1], std::min(block, n - i), q.extent[3]}, {q.stride[1], q.stride[2], 1}},
          n - i, tau_init_, s);
  }

 private:
  // Scratch of a callback, for one block of queries after the other.
  struct Room {
    Room(const kvlab::LayerKv& kv, std::int64_t queries, int noisy)
        : vectors(kv.scratch<float>("queries", {kv.shape->query_heads, queries, kv.pages.head_dim})),
          shares(kv.scratch<float>("shares", {1, kv.shape->query_heads * queries, kv.max_length})),
          sum(kv.scratch<float>("sum", {1, kv.kv_heads(), kv.max_length})) {
      if (noisy > 0) noise = kv.scratch<float>("noise", {kv.shape->group() * queries, kv.kv_heads(), kv.max_length});
    }
    View<float, 3> vectors, shares, sum, noise;
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
    if (noise_) add_noise(kv, room, row, kv.position[row] - newest, static_cast<int>(count), shares, s);
    for (int i = 0; i < count; ++i)
      kvlab::ops::set_pinned(
          one, {.last = newest - 1 - i}, -INFINITY,
          {shares.data + i * shares.stride[1], {1, heads, kv.max_length}, {0, count * shares.stride[1], 1}}, s);
    kvlab::ops::softmax(one, shares, static_cast<float>(tau), s);
    kvlab::ops::group_reduce(one, shares, kvlab::GroupRule::sum, room.sum, s);
    kvlab::ops::blend_state({&one, kv.state("score").column}, 1, room.sum, 1 / static_cast<float>(kv.shape->group()),
                            s);
  }

  // Gumbel noise -ln(-ln u) on the logits of queries at text positions from `first` on. u is a draw that the sequence,
  // the layer, the query's head and position, and the token's position decide: neither places nor slots. The two
  // smallest numbers keep 0 and the neighbour of 1 away from the ends of the logarithms.
  void add_noise(const kvlab::LayerKv& kv, const Room& room, int row, int first, int count, View<float, 3> shares,
                 kvlab::Stream s) const {
    const int group = kv.shape->group();
    kvlab::PagedKv many = kv.pages;
    many.rows = group * count;
    const std::uint64_t sequence = kvlab::Random(seed_, kv.sequence[row] + std::uint64_t{1}).next();
    std::vector<std::uint64_t> keys;
    for (int g = 0; g < group; ++g)
      for (int i = 0; i < count; ++i)
        keys.push_back(kvlab::Random(sequence + static_cast<std::uint64_t>(g),
                                     static_cast<std::uint64_t>(first + i) << 32 | static_cast<std::uint32_t>(kv.layer))
                           .next());
    const std::vector<std::int32_t> slots(keys.size(), kv.slots[row]);
    many.slots = kvlab::upload(*kv.workspace, "slots", slots.data(), {many.rows}).data;
    const auto noise = View<float, 3>::dense(room.noise.data, {many.rows, kv.kv_heads(), kv.max_length});
    kvlab::ops::random_scores(many, kvlab::upload(*kv.workspace, "keys", keys.data(), {many.rows}).data, noise, s);
    kvlab::ops::logarithm(noise, 0x1p-26f, s);
    kvlab::ops::negate(noise, s);
    kvlab::ops::logarithm(noise, 0, s);
    // Query head KV head * group + g has its queries one after the other, and so has `shares`.
    const View<float, 3> logits{
        shares.data, {many.rows, kv.kv_heads(), kv.max_length}, {shares.stride[1], many.rows * shares.stride[1], 1}};
    kvlab::ops::add(logits, noise, -1, s);
  }

  int recent_, every_, steps_;
  double tau_init_, tau_end_;
  std::uint64_t seed_;
  bool noise_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::scorer<Keyformer>("keyformer",
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
