#include <complex>

#include "ops/score/low_rank.hpp"
#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 130, steps = 5, chunk = 4, outliers = 3, local = 2, limit = 40;

using Settings = std::map<std::string, ParamValue>;
using Matrix = std::vector<std::vector<double>>;  // [token][element]

Settings params(int rank, Settings more = {}) {
  more.insert({{"rank", std::int64_t{rank}},
               {"chunk", std::int64_t{chunk}},
               {"outliers", std::int64_t{outliers}},
               {"local_chunks", std::int64_t{local}},
               {"offload", false}});
  return more;
}
OnText run_with(const Settings& of, int tokens = limit, int text = prompt + steps, int page = 16) {
  return OnText(Role::policy, "shadowkv", of, tokens, text, page);
}

// The keys that the model made for the text positions from `first` on.
Matrix keys_of(const OnText& run, int layer, int head, std::size_t first = 0, std::size_t end = prompt) {
  Matrix keys;
  for (std::size_t t = first; t < end; ++t) keys.push_back(run.layer(layer).keys.at[t][static_cast<std::size_t>(head)]);
  return keys;
}

// Functions below take a head's keys at a prompt's end.
int chunks_of(const Matrix& keys) { return static_cast<int>(keys.size()) / chunk - local; }

Matrix landmarks(const Matrix& keys) {
  Matrix means;
  for (std::size_t c = 0; c < static_cast<std::size_t>(chunks_of(keys)); ++c) {
    auto& mean = means.emplace_back(keys[0].size());
    for (std::size_t t = c * chunk; t < (c + 1) * chunk; ++t)
      for (std::size_t d = 0; d < mean.size(); ++d) mean[d] += keys[t][d] / chunk;
  }
  return means;
}

// The chunks whose least cosine of a key with the landmark is among the smallest.
std::vector<int> outliers_of(const Matrix& keys, std::size_t count = outliers) {
  const Matrix means = landmarks(keys);
  std::vector<double> apart;
  for (std::size_t c = 0; c < means.size(); ++c) {
    double least = 1;
    for (std::size_t t = c * chunk; t < (c + 1) * chunk; ++t)
      least = std::min(least, dot(means[c], keys[t]) / std::sqrt(dot(means[c], means[c]) * dot(keys[t], keys[t])));
    apart.push_back(-least);
  }
  return best(apart, positions_to(chunks_of(keys)), count);
}

bool has(const std::vector<int>& list, int x) { return std::binary_search(list.begin(), list.end(), x); }

// What the step at this text position reads of a head.
std::vector<int> reads(const OnText& run, const Matrix& keys, int layer, int head, int position,
                       std::size_t of_outliers = outliers, bool mean = false, double divisor = 64) {
  const Matrix means = landmarks(keys);
  const int chunks = chunks_of(keys);
  const std::vector<int> apart = outliers_of(keys, of_outliers);
  std::vector<int> others;
  for (int c = 0; c < chunks; ++c)
    if (!has(apart, c)) others.push_back(c);
  std::vector<double> score(others.size());
  for (int g = 0; g < run.group(); ++g) {
    const auto& q =
        run.layer(layer)
            .queries.at[static_cast<std::size_t>(position)][static_cast<std::size_t>(head * run.group() + g)];
    std::vector<double> logits;
    for (const int c : others) logits.push_back(dot(q, means[static_cast<std::size_t>(c)]) / std::sqrt(divisor));
    const std::vector<double> share = softmax(logits);
    for (std::size_t i = 0; i < share.size(); ++i) score[i] = mean ? score[i] + share[i] : std::max(score[i], share[i]);
  }
  std::vector<int> tokens;
  const std::vector<int> chosen = best(score, others, limit / chunk - local - of_outliers);
  for (int t = 0; t <= position; ++t)
    if (const int c = t / chunk; c >= chunks || has(apart, c) || has(chosen, c)) tokens.push_back(t);
  return tokens;
}

// Turns a key by so many positions: pairs are complex numbers.
void turn(std::vector<double>& x, const RopeTable& rope, double positions) {
  for (std::size_t i = 0; i < x.size() / 2; ++i) {
    const auto y =
        std::complex<double>(x[i], x[x.size() / 2 + i]) * std::polar(1., positions * double{rope.inv_freq[i]});
    x[i] = y.real(), x[x.size() / 2 + i] = y.imag();
  }
}

// A layer's keys [head] of low rank: of X [token, all heads' elements] before RoPE, U U^T X by the eigenvectors U of
// X X^T.
std::vector<Matrix> factorised(std::vector<Matrix> keys, const RopeTable& rope, int rank) {
  const std::size_t n = keys[0].size();
  for (Matrix& x : keys)
    for (std::size_t t = 0; t < n; ++t) turn(x[t], rope, -static_cast<double>(t));
  std::vector<double> gram, values, vectors;
  for (std::size_t a = 0; a < n; ++a)
    for (std::size_t b = 0; b < n; ++b) {
      double sum = 0;
      for (const Matrix& x : keys) sum += dot(x[a], x[b]);
      gram.push_back(sum);
    }
  ops::eigen_reference(gram, static_cast<int>(n), values, vectors);
  std::vector<Matrix> out;
  for (const Matrix& x : keys) {
    Matrix& low = out.emplace_back(n, std::vector<double>(x[0].size()));
    for (std::size_t q = 0; q < static_cast<std::size_t>(rank); ++q) {
      std::vector<double> sum(x[0].size());
      for (std::size_t t = 0; t < n; ++t)
        for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += vectors[q * n + t] * x[t][d];
      for (std::size_t t = 0; t < n; ++t)
        for (std::size_t d = 0; d < sum.size(); ++d) low[t][d] += vectors[q * n + t] * sum[d];
    }
    for (std::size_t t = 0; t < n; ++t) turn(low[t], rope, static_cast<double>(t));
  }
  return out;
}

double distance(const std::vector<float>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t d = 0; d < b.size(); ++d) sum += std::pow(double{a[d]} - b[d], 2);
  return std::sqrt(sum);
}

}  // namespace

TEST_CASE("shadowkv reads on real text what a plain implementation reads") {
  const bool mean = GENERATE(false, true), without = GENERATE(false, true);
  const int divisor = mean ? 128 : 0, rank = without ? 256 : 20;
  CAPTURE(mean, without);
  Settings more{{"outlier_chunks", !without}, {"logit_dim", std::int64_t{divisor}}};
  if (mean) more["group"] = std::string("mean");
  OnText run = run_with(params(rank, more));
  run.prefill(prompt);
  for (int step = 0; step < steps; ++step) run.step();
  std::set<std::vector<int>> different;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      for (int step = 0; step < steps; ++step) {
        CAPTURE(layer, head, step);
        const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
        CHECK(read == reads(run, keys_of(run, layer, head), layer, head, prompt + step, without ? 0 : outliers, mean,
                            divisor ? divisor : 64));
        different.insert(read);
      }
      CHECK(run.kept(layer, head) == positions_to(prompt + steps));
    }
  CHECK(different.size() > 100);
}

TEST_CASE("shadowkv stores keys of low rank but for outliers and what lies behind the chunks") {
  const bool without = GENERATE(false, true);
  CAPTURE(without);
  constexpr int rank = 20;
  OnText run = run_with(params(rank, {{"outlier_chunks", !without}}));
  run.prefill(prompt);
  double most = 0;
  for (int layer = 0; layer < run.config().layers; ++layer) {
    std::vector<Matrix> of_heads;
    for (int head = 0; head < run.config().kv_heads; ++head) of_heads.push_back(keys_of(run, layer, head));
    const std::vector<Matrix> low = factorised(of_heads, run.rope(), rank);
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      const Matrix& exact = of_heads[static_cast<std::size_t>(head)];
      const std::vector<int> apart = outliers_of(exact, without ? 0 : outliers);
      const auto keys = run.stored(KvSide::key, layer, head), values = run.stored(KvSide::value, layer, head);
      std::size_t wrong = 0;
      for (std::size_t t = 0; t < prompt; ++t) {
        const int c = static_cast<int>(t) / chunk;
        const double length = std::sqrt(dot(exact[t], exact[t]));
        if (c >= chunks_of(exact) || has(apart, c)) {
          wrong += distance(keys[t], exact[t]) != 0;
        } else {
          wrong += distance(keys[t], low[static_cast<std::size_t>(head)][t]) > 1e-4 * length;
          most = std::max(most, distance(keys[t], exact[t]) / length);
        }
        wrong += distance(values[t], run.layer(layer).values.at[t][static_cast<std::size_t>(head)]) != 0;
      }
      CHECK(wrong == 0);
    }
  }
  CHECK(most > .1);  // the rank is low enough to change something
}

TEST_CASE("shadowkv: a second prompt's end does all of it anew, with the keys as they are stored by then") {
  constexpr int rank = 20, second = 37, all = prompt + steps + second;
  OnText run = run_with(params(rank), limit, all + steps), before = run_with(params(rank), limit, all + steps);
  for (OnText* x : {&run, &before}) {
    x->prefill(prompt);
    for (int i = 0; i < steps; ++i) x->step();
  }
  run.prefill(second);
  std::vector<std::vector<Matrix>> keys;
  int former = 0, generated = 0;  // keys that were exact and are not any more
  for (int layer = 0; layer < run.config().layers; ++layer) {
    std::vector<Matrix>& of_heads = keys.emplace_back();
    for (int head = 0; head < run.config().kv_heads; ++head) {
      Matrix& x = of_heads.emplace_back();
      for (const auto& key : before.stored(KvSide::key, layer, head)) x.emplace_back(key.begin(), key.end());
      for (const auto& key : keys_of(run, layer, head, prompt + steps, all)) x.push_back(key);
    }
    const std::vector<Matrix> low = factorised(of_heads, run.rope(), rank);
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      const Matrix &x = of_heads[static_cast<std::size_t>(head)], made = keys_of(run, layer, head, 0, all);
      const std::vector<int> apart = outliers_of(x);
      const auto got = run.stored(KvSide::key, layer, head);
      REQUIRE(got.size() == all);
      std::size_t wrong = 0;
      for (std::size_t t = 0; t < all; ++t) {
        const int c = static_cast<int>(t) / chunk;
        if (c >= chunks_of(x) || has(apart, c))
          wrong += distance(got[t], x[t]) != 0;
        else
          wrong += distance(got[t], low[static_cast<std::size_t>(head)][t]) > 1e-4 * std::sqrt(dot(x[t], x[t]));
        if (x[t] == made[t] && distance(got[t], x[t]) != 0) {
          former += t < prompt;
          generated += t >= prompt && t < prompt + steps;
        }
      }
      CHECK(wrong == 0);
    }
  }
  CHECK(former > 0);
  CHECK(generated > 0);
  for (int step = 0; step < steps; ++step) run.step();
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head)
      for (int step = 0; step < steps; ++step) {
        CAPTURE(layer, head, step);
        CHECK(
            run.layer(layer).read[static_cast<std::size_t>(steps + step)][static_cast<std::size_t>(head)] ==
            reads(run, keys[static_cast<std::size_t>(layer)][static_cast<std::size_t>(head)], layer, head, all + step));
      }
}

TEST_CASE("shadowkv: a rank that all keys have changes next to nothing, and without low_rank nothing changes") {
  const int rank = GENERATE(130, 255, 256, 3);
  CAPTURE(rank);
  OnText run = run_with(params(rank, {{"low_rank", rank != 3}}));
  run.prefill(prompt);
  double most = 0;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      const Matrix exact = keys_of(run, layer, head);
      const auto keys = run.stored(KvSide::key, layer, head);
      for (std::size_t t = 0; t < prompt; ++t)
        most = std::max(most, distance(keys[t], exact[t]) / std::sqrt(dot(exact[t], exact[t])));
    }
  CHECK(most < 1e-5);
  CHECK((most == 0) == (rank == 3));
}

TEST_CASE("shadowkv: a prompt that the budget holds is read as a whole and keeps its keys") {
  const auto changes = [](int tokens) {
    OnText run = run_with(params(20));
    run.prefill(tokens);
    run.step();
    const auto keys = run.stored(KvSide::key, 5, 1);
    double most = 0;
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t)
      most = std::max(most, distance(keys[t], run.layer(5).keys.at[t][1]));
    return std::pair{run.layer(5).read[0][1].size(), most > 0};
  };
  CHECK(changes(1) == std::pair{std::size_t{2}, false});
  CHECK(changes(7) == std::pair{std::size_t{8}, false});
  CHECK(changes(limit) == std::pair{std::size_t{limit + 1}, false});
  // One token is in no chunk and read besides; it was in a chunk's place before.
  CHECK(changes(limit + 1) == std::pair{std::size_t{limit + 2}, true});
  CHECK(changes(limit + chunk) == std::pair{std::size_t{limit + 1}, true});
}

namespace {

constexpr int longest = prompt + steps;

// What each layer's steps read, by KV head, after a prompt of so many tokens.
class Reads final : public EngineObserver {
 public:
  Reads(const BudgetAmount& budget, int tokens) {
    static const std::shared_ptr<const Model> model = load_model(*open_model("bundled/recall", "", ""), DType::f32, "");
    static Registry registry;
    const RegistryCatalog catalog(registry);
    PolicySpec spec;
    spec.name = "shadowkv";
    spec.policy = PluginUse{Role::policy, spec.name, resolve(registry.require(Role::policy, spec.name), params(20))};
    EngineOptions o;
    o.budget = budget;
    o.max_tokens = longest;
    Engine engine(model, build_policy(spec, catalog, nullptr), o);
    engine.observe(this);
    const int slot = engine.open();
    std::vector<int> text;
    for (int t = 0; t < tokens; ++t) text.push_back(3 + t * t % 400);
    REQUIRE(engine.prefill(slot, text, true, {}) == Fit::ok);
    for (int step = 0; step < steps; ++step) REQUIRE(engine.step({slot}, {&text[9], 1}, {}) == Fit::ok);
  }
  void attended(const DecodeLayer& l, const Store&) override {
    for (std::int64_t h = 0; h < l.read.tokens->count.extent[1]; ++h) {
      lists.emplace_back();
      for (int i = 0; i < l.read.tokens->count(0, h); ++i) lists.back().push_back(l.read.tokens->index(0, h, i));
    }
  }
  std::vector<std::vector<int>> lists;
};

std::set<int> pages_of(const std::vector<int>& tokens, int page) {
  std::set<int> pages;
  for (const int t : tokens) pages.insert(t / page);
  return pages;
}

std::int64_t moved(const OnText& run, Tier tier, Tag tag) {
  return run.ledger().moved(tier)[static_cast<std::size_t>(tag)];
}

}  // namespace

TEST_CASE("shadowkv: a ratio is one of the prompt, in whole chunks, and holds what is read in any case") {
  const auto ratio = [](double value, int tokens) { return Reads({BudgetAmount::ratio, value}, tokens).lists; };
  const auto of_tokens = [](double value, int tokens) { return Reads({BudgetAmount::tokens, value}, tokens).lists; };
  const auto whole = ratio(.32, prompt);  // 41.6 tokens
  CHECK(whole.size() > 100);
  CHECK(whole == of_tokens(limit, prompt));
  CHECK(whole == of_tokens(limit + chunk - 1, prompt));
  CHECK(whole != of_tokens(limit + chunk, prompt));
  CHECK(ratio(.32, 70) == of_tokens((outliers + local + 1) * chunk, 70));  // 22.4 tokens
  CHECK(ratio(.32, 20) == of_tokens(limit, 20));                           // all of it
}

TEST_CASE("shadowkv reads the same with pages on the host, where values alone come back") {
  constexpr int rank = 20, many = 24;
  const int page = GENERATE(4, 16);  // a chunk, or four
  const bool factorises = GENERATE(true, false);
  CAPTURE(page, factorises);
  Settings here{{"low_rank", factorises}}, away = here;
  away["offload"] = true;
  OnText resident = run_with(params(rank, here), limit, prompt + many, page),
         run = run_with(params(rank, away), limit, prompt + many, page);
  for (OnText* x : {&resident, &run}) x->prefill(prompt);
  const int layers = run.config().layers, heads = run.config().kv_heads;
  const std::int64_t values = std::int64_t{page} * run.config().head_dim * 4;
  CHECK(moved(run, Tier::device, Tag::values) == 0);
  CHECK(moved(run, Tier::host, Tag::values) == std::int64_t{layers} * heads * (prompt / page) * values);
  // Pages that are read at any rate stay, but for those that only the prompt's end has.
  std::vector<std::set<int>> there;
  for (int layer = 0; layer < layers; ++layer)
    for (int head = 0; head < heads; ++head) {
      const std::vector<int> on = run.pages_on(Tier::device, layer, head);
      there.emplace_back(on.begin(), on.end());
    }
  std::int64_t missed = 0, most = 0;
  for (int step = 0; step < many; ++step) {
    for (OnText* x : {&resident, &run}) x->step();
    for (int layer = 0; layer < layers; ++layer)
      for (int head = 0; head < heads; ++head) {
        CAPTURE(step, layer, head);
        const auto& read = run.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)];
        CHECK(read == resident.layer(layer).read[static_cast<std::size_t>(step)][static_cast<std::size_t>(head)]);
        const std::set<int> wanted = pages_of(read, page);
        const std::vector<int> on = run.pages_on(Tier::device, layer, head);
        CHECK(std::set<int>(on.begin(), on.end()) == wanted);
        std::set<int>& before = there[static_cast<std::size_t>(layer * heads + head)];
        for (const int x : wanted) missed += !before.contains(x) && x * page < prompt;
        before = wanted;
        most = std::max<std::int64_t>(most, std::ssize(wanted));
      }
    CHECK(moved(run, Tier::device, Tag::values) == missed * values);
    CHECK(moved(run, Tier::device, Tag::keys) == (factorises ? 0 : missed * values));
  }
  CHECK(missed > 100);
  // The budget's chunks, and pages of what lies behind all chunks.
  if (page == chunk) CHECK(most == limit / chunk + (prompt % chunk + many + chunk - 1) / chunk);
  for (int layer = 0; layer < layers; ++layer) CHECK(run.layer(layer).outputs.at == resident.layer(layer).outputs.at);
  const auto frames = [&](const OnText& x) {
    return x.ledger().held(Tier::device)[static_cast<std::size_t>(Tag::values)];
  };
  if (page == chunk) CHECK(frames(run) < frames(resident) / 2);
}

TEST_CASE("shadowkv: a second prompt has its pages back, and what follows reads the same with pages on the host") {
  constexpr int rank = 20, second = 37, all = prompt + steps + second;
  OnText resident = run_with(params(rank), limit, all + steps, 8),
         run = run_with(params(rank, {{"offload", true}}), limit, all + steps, 8);
  for (OnText* x : {&resident, &run}) {
    x->prefill(prompt);
    for (int i = 0; i < steps; ++i) x->step();
    x->prefill(second);
    for (int i = 0; i < steps; ++i) x->step();
  }
  CHECK(moved(run, Tier::device, Tag::keys) > 0);
  for (int layer = 0; layer < run.config().layers; ++layer) {
    CAPTURE(layer);
    CHECK(run.layer(layer).outputs.at == resident.layer(layer).outputs.at);
    CHECK(run.layer(layer).read == resident.layer(layer).read);
  }
}

TEST_CASE("shadowkv: what it cannot obey is refused") {
  using Catch::Contains;
  const auto attach = [](const BudgetAmount& budget) {
    Registry registry;
    const PluginInfo& info = registry.require(Role::policy, "shadowkv");
    const auto policy = create<Policy>(info, resolve(info, params(20)));
    Shape shape;
    shape.layers = shape.max_slots = 1, shape.query_heads = shape.kv_heads = 4, shape.head_dim = 8;
    shape.page_size = 8, shape.max_tokens = 256;
    HeapWorkspace w;
    policy->attach(shape, budget, w);
  };
  CHECK_THROWS_WITH(run_with(params(257)), Contains("got rank 257, wanted 1 to 256"));
  CHECK_NOTHROW(run_with(params(257, {{"low_rank", false}})));
  CHECK_NOTHROW(attach({BudgetAmount::ratio, .5}));
  CHECK_THROWS_WITH(attach({BudgetAmount::bytes, 1e6}), Contains("got a budget in bytes, wanted tokens"));
  CHECK_NOTHROW(attach({BudgetAmount::ratio, 1}));
  CHECK_THROWS_WITH(run_with(params(20, {{"outliers", std::int64_t{1} << 20}})), Contains("shadowkv.outliers: got"));
  CHECK_THROWS_WITH(run_with(params(0)), Contains("shadowkv.rank: got 0"));
  CHECK_THROWS_WITH(run_with(params(20), 20), Contains("got a budget of 20 tokens, wanted at least 24"));
  CHECK_NOTHROW(run_with(params(20), 24));
  CHECK_THROWS_WITH(run_with(params(20, {{"group", std::string("sum")}})),
                    Contains("got group sum, wanted max or mean"));
}
