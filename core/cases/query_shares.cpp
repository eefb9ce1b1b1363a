// Shares of many queries, as sums, as greatest ones and as counts of small ones.
#include <fmt/format.h>

#include "cases/layer.hpp"
#include "cases/on_caches.hpp"
#include "ops/score/query_shares.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;

constexpr std::pair<ShareRule, const char*> rules[] = {{ShareRule::sum, "sum"},
                                                       {ShareRule::max, "max"},
                                                       {ShareRule::below_mean, "below_mean"},
                                                       {ShareRule::below_each, "below_each"}};

// The GPU's kernel splits a query into its rounded value and a rounded rest: a logit errs by up to 2^-17 of its size.
double margin(Device device) { return device == Device::cpu ? 2e-5 : 5e-4; }

// Each count must lie between those of a level a bit lower and a bit higher, and most of these must be equal.
void check_counts(Place& place, Check& check, const std::string& what, const View<const float, 4>& queries,
                  const Tensor<4>& there, const PagedKv& kv, const PagedKv& kv_there, const QueryShares& how,
                  const QueryShares& how_there, std::array<std::int64_t, 3> extent) {
  const double slack = 2 * margin(place.stream().device());
  const Guarded<3> low(extent), high(extent);
  const auto got = place.put(Guarded<3>(extent).view());
  ops::query_shares_reference(queries, kv, how, 1 - slack, low.view());
  ops::query_shares_reference(queries, kv, how, 1 + slack, high.view());
  ops::query_shares(there, kv_there, how_there, got, place.stream());
  const auto counts = place.get(got);
  const auto lows = low.values(), highs = high.values();
  std::size_t wrong = 0, loose = 0, numbers = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    ++numbers;
    wrong += counts[i] >= lows[i] && counts[i] <= highs[i] ? 0 : 1;
    loose += lows[i] == highs[i] ? 0 : 1;
  }
  check.that(fmt::format("{}: {} of {} counts are wrong", what, wrong, numbers), wrong == 0);
  check.that(fmt::format("{}: {} of {} counts are certain", what, numbers - loose, numbers),
             10 * loose <= numbers + 20);
}

// Every rule on a cache, with and without noise, temperatures, an end of what is seen, and the same end for all.
void check_rules(Place& place, Check& check, const View<const float, 4>& queries, const PagedKv& kv,
                 const PagedKv& kv_there, const Ints& seen, std::int64_t room, unsigned seed) {
  std::mt19937_64 rng(seed);
  const std::int64_t rows = kv.rows, window = queries.extent[2];
  std::vector<std::uint64_t> keys(static_cast<std::size_t>(rows * queries.extent[1] / kv.kv_heads * window));
  for (auto& key : keys) key = rng();
  std::vector<float> temperatures;
  for (std::int64_t r = 0; r < rows; ++r) temperatures.push_back(.7f + .6f * static_cast<float>(r));
  const auto there = place.put(queries);
  const std::int32_t* seen_there = place.put(seen);
  const std::uint64_t* keys_there = place.put(keys);
  const float* temperatures_there = place.put(temperatures);
  const std::array<std::int64_t, 3> extent{rows, kv.kv_heads, room};
  for (const auto& [rule, name] : rules)
    for (unsigned form = 0; form < 4; ++form) {
      QueryShares plain, on_place;
      plain.rule = on_place.rule = rule;
      if (form != 0) plain.seen = seen.data(), on_place.seen = seen_there;
      plain.alike = on_place.alike = plain.of_slots = on_place.of_slots = form == 2;
      if (form != 1) plain.noise = keys.data(), on_place.noise = keys_there;
      if (form >= 2) plain.temperature = temperatures.data(), on_place.temperature = temperatures_there;
      const std::string what = fmt::format("{}, form {}", name, form);
      if (ops::counts_below(rule)) {
        check_counts(place, check, what, queries, there, kv, kv_there, plain, on_place, extent);
        continue;
      }
      same<3>(
          place, check, what, Guarded<3>(extent).view(), margin(place.stream().device()),
          [&](Scores out) { ops::query_shares(there, kv_there, on_place, out, place.stream()); },
          [&](Scores out) { ops::query_shares_reference(queries, kv, plain, 1, out); });
    }
}

void check_on_cache(OnCache& x) {
  const int window = x.n % 3 ? 1 + static_cast<int>(x.n % 9) : 40;
  Numbers<4> queries(x, {x.c.rows(), x.c.heads(), window, x.kv.head_dim});
  Ints seen;
  for (int r = 0; r < x.c.rows(); ++r) seen.push_back(3 * x.kv.tokens(r, 0) + 1);
  check_rules(x.place, x.check, queries.view(), x.kv, x.there, seen, x.c.room(), x.n);
}

// Shapes of the tensor cores, also with more queries than one launch takes.
void check_wide(Place& place, Check& check, CodecSide keys) {
  unsigned seed = 1;
  for (const int dim : {64, 96, 128, 256})
    for (const int window : {1, 33, 150}) {
      if (quick() && dim != 64 && window == 150) continue;
      const int group = window == 33 ? 4 : dim == 96 ? 1 : 2;
      PagedOptions o;
      o.rows = 2, o.kv_heads = 2, o.head_dim = dim, o.page_size = window % 2 ? 8 : 16, o.dtype = DType::bf16;
      o.codec.k = keys;
      o.max_pages = 200 / o.page_size + 1;
      PagedFixture cache(o);
      std::mt19937 rng(seed++);
      const int lengths[] = {200, 130, 0, 1};
      for (int i = 0; i < 4; ++i) cache.fill_random(i / 2, i % 2, lengths[i], rng);
      const std::int64_t heads = std::int64_t{o.kv_heads} * group;
      const auto q = normals(o.rows * heads * window * dim, seed);
      const auto scope = check.in(fmt::format("head size {}, {} queries, group {}", dim, window, group));
      check_rules(place, check, View<const float, 4>::dense(q.data(), {o.rows, heads, window, dim}), cache.view(),
                  place.put(cache.view(), cache.arena_bytes()), {200, 1}, 205, seed);
    }
}

constexpr int timed_queries = 400;
// The last queries of a prompt.
template <ShareRule Rule, bool Noise>
class Last final : public Scene {
 public:
  Last(Place& place, int copies)
      : place_(place),
        layer_(place, copies),
        q_(randoms(std::int64_t{Layer::query_heads} * timed_queries * Layer::head_dim)),
        out_(View<float, 3>::dense(place.take<float>(std::size_t{Layer::kv_heads} * Layer::tokens),
                                   {1, Layer::kv_heads, Layer::tokens})) {
    std::mt19937_64 rng(1);
    for (int i = 0; i < Layer::query_heads / Layer::kv_heads * timed_queries; ++i) keys_.push_back(rng());
    queries_ = of(place.put(q_));
    plain_.rule = there_.rule = Rule;
    plain_.seen = &Layer::tokens, there_.seen = place.put(&Layer::tokens, 1);
    if (Noise) plain_.noise = keys_.data(), there_.noise = place.put(keys_);
  }
  void run(int copy) override {
    ops::query_shares(queries_, layer_.there[static_cast<std::size_t>(copy)], there_, out_, place_.stream());
  }
  void check(Check& check) override {
    if (ops::counts_below(Rule))
      return check_counts(place_, check, "counts", of(q_.data()), queries_, layer_.plain, layer_.there[0], plain_,
                          there_, out_.extent);
    const Guarded<3> wanted(out_.extent);
    ops::query_shares_reference(of(q_.data()), layer_.plain, plain_, 1, wanted.view());
    run(0);
    check.equal("shares", place_.get(out_), wanted.values(), margin(place_.stream().device()));
  }

 private:
  static View<const float, 4> of(const float* q) {
    return View<const float, 4>::dense(q, {1, Layer::query_heads, timed_queries, Layer::head_dim});
  }
  Place& place_;
  Layer layer_;
  std::vector<float> q_;
  std::vector<std::uint64_t> keys_;
  View<const float, 4> queries_;
  QueryShares plain_, there_;
  Scores out_;
};

template <ShareRule Rule, bool Noise>
Case of_last(const char* what) {
  const int tokens = Layer::tokens;
  Case c = on_layer<Last<Rule, Noise>>(fmt::format("{}, {} queries, {} tokens", what, timed_queries, tokens),
                                       {.bytes = 8. * Layer::kv_heads * tokens * Layer::head_dim,
                                        .flops = 4. * Layer::query_heads * timed_queries * Layer::head_dim * tokens,
                                        .reads = false});
  c.op = "query_shares";
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v = {on_caches("query_shares", "shares of queries", 36, check_on_cache),
                         checked("query_shares", "head sizes of the tensor cores",
                                 [](Place& place, Check& check) { check_wide(place, check, {}); })};
  for (const CodecSide keys : sides_with_codes)
    v.push_back(checked("query_shares", "head sizes of the tensor cores, keys of " + format_of(keys, ""),
                        [keys](Place& place, Check& check) { check_wide(place, check, keys); }));
  v.push_back(of_last<ShareRule::below_mean, false>("below_mean"));
  v.push_back(of_last<ShareRule::sum, true>("sum with noise"));
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
