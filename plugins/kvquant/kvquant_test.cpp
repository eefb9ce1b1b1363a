#include <random>

#include "support/on_text.hpp"
#include "support/quantile.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 120, steps = 3;
using Row = std::vector<double>;
using ParamMap = std::map<std::string, ParamValue>;

// A key as it was before RoPE, or that key with RoPE.
Row turned(Row x, const RopeTable& rope, double position) {
  const std::size_t half = x.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = position * double{rope.inv_freq[i]}, a = x[i], b = x[half + i];
    x[i] = a * std::cos(angle) - b * std::sin(angle), x[half + i] = b * std::cos(angle) + a * std::sin(angle);
  }
  return x;
}

// Centres and levels of 2^bits entries.
struct Book {
  Row centres, levels;
};

// What a number becomes. *unsure: rounding may decide otherwise.
double coded(double x, double lower, double upper, const Book& book, bool outliers, bool* unsure) {
  constexpr double near = 1e-5;
  const double zero = (lower + upper) / 2, range = (upper - lower) / 2;
  *unsure = outliers && std::min(std::abs(x - lower), std::abs(x - upper)) < near * range;
  if (outliers && (x < lower || x > upper)) return x;
  Row distance;
  for (const double c : book.centres) distance.push_back(std::abs((x - zero) / range - c));
  const auto nearest = std::min_element(distance.begin(), distance.end()) - distance.begin();
  const double least = distance[static_cast<std::size_t>(nearest)];
  std::sort(distance.begin(), distance.end());
  *unsure = *unsure || distance[1] - least < near;
  return zero + range * book.levels[static_cast<std::size_t>(nearest)];
}

// Keys of the prompt before RoPE, as the model makes them: [layer][head][d][token].
const std::vector<std::vector<std::vector<Row>>>& channels() {
  static const auto all = [] {
    OnText run(Role::policy, "kvquant", {{"calibration", false}}, 0, prompt + steps, 16);
    run.prefill(prompt);
    std::vector<std::vector<std::vector<Row>>> out;
    for (int l = 0; l < run.config().layers; ++l) {
      auto& heads = out.emplace_back(run.config().kv_heads);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        heads[h].resize(static_cast<std::size_t>(run.config().head_dim));
        for (std::size_t t = 0; t < prompt; ++t) {
          const Row key = turned(run.layer(l).keys.at[t][h], run.rope(), -static_cast<double>(t));
          for (std::size_t d = 0; d < key.size(); ++d) heads[h][d].push_back(key[d]);
        }
      }
    }
    return out;
  }();
  return all;
}

// Thresholds are quantiles of the prompt itself. Entries are random, and those of Q-Norm have other levels.
Profile calibrated(int layers, int kv_heads) {
  Profile p;
  std::mt19937 rng(5);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (const std::string which : {"", "_all"}) {
    const double share = which.empty() ? .05 : 0;
    for (const bool upper : {false, true}) {
      ProfileArray& array = p[(upper ? "key_upper" : "key_lower") + which];
      for (const auto& heads : channels())
        for (const auto& head : heads)
          for (const Row& channel : head)
            array.values.push_back(static_cast<float>(plain_quantile(channel, upper ? 1 - share / 2 : share / 2)));
      array.extent = {layers, kv_heads, static_cast<std::int64_t>(channels()[0][0].size())};
    }
    for (const char* side : {"key_codebook", "value_codebook"}) {
      ProfileArray& array = p[side + which];
      for (int l = 0; l < layers; ++l)
        for (const std::ptrdiff_t entries : {4, 4, 8, 16}) {
          for (std::ptrdiff_t i = 0; i < entries; ++i) array.values.push_back(uniform(rng));
          std::sort(array.values.end() - entries, array.values.end());
        }
      array.extent = {static_cast<std::int64_t>(array.values.size())};
    }
  }
  p["outlier_share"] = {{1}, {.05f}, ""};
  return p;
}

OnText run_with(ParamMap params, const OnText::MakeProfile& make = calibrated, int tokens = prompt + steps) {
  params.emplace("outlier_share", .05);
  return OnText(Role::policy, "kvquant", params, 0, tokens, 16, make);
}

struct Setting {
  int bits = 3;
  bool q_norm = true, outliers = true, nonuniform = true, calibration = true;
  std::size_t dense = 0;

  ParamMap params() const {
    return {{"bits", std::int64_t{bits}}, {"q_norm", q_norm},
            {"outliers", outliers},       {"nonuniform", nonuniform},
            {"calibration", calibration}, {"dense_tokens", static_cast<std::int64_t>(dense)}};
  }
  Book book(const Profile& p, const char* side, std::size_t layer) const {
    const std::size_t entries = std::size_t{1} << bits;
    Book b;
    for (std::size_t i = 0; i < entries; ++i) {
      if (!nonuniform || !calibration) {
        b.centres.push_back(-1 + 2 * static_cast<double>(i) / static_cast<double>(entries - 1));
        b.levels = b.centres;
        continue;
      }
      const std::vector<float>& x = p.at(std::string(side) + (outliers ? "" : "_all")).values;
      b.centres.push_back(x[32 * layer + entries + i]);
      b.levels.push_back(x[32 * layer + (bits == 2 && q_norm ? 0 : entries) + i]);
    }
    return b;
  }
};

// Compares what the cache holds at places [from, to) with a plain implementation.
void compare(const OnText& run, const Setting& how, std::size_t from, std::size_t to) {
  const Profile p = calibrated(run.config().layers, run.config().kv_heads);
  const auto heads = static_cast<std::size_t>(run.config().kv_heads), dim = channels()[0][0].size();
  const double share = how.outliers ? .05 : 0;
  std::size_t differ = 0, unsure = 0, exact = 0, numbers = 0;
  for (int l = 0; l < run.config().layers; ++l) {
    const auto layer = static_cast<std::size_t>(l);
    std::vector<std::vector<std::vector<float>>> got[2];
    for (int h = 0; h < run.config().kv_heads; ++h)
      got[0].push_back(run.stored(KvSide::key, l, h)), got[1].push_back(run.stored(KvSide::value, l, h));
    for (std::size_t t = from; t < to; ++t)
      for (const bool key : {true, false}) {
        const Book book = how.book(p, key ? "key_codebook" : "value_codebook", layer);
        // Of all heads, as they are coded.
        std::vector<Row> x = (key ? run.layer(l).keys : run.layer(l).values).at[t];
        if (key)
          for (Row& row : x) row = turned(row, run.rope(), -static_cast<double>(t));
        Row token;
        for (const Row& row : x) token.insert(token.end(), row.begin(), row.end());
        const bool by_channel = key && how.calibration;
        const double low = plain_quantile(token, share / 2), high = plain_quantile(token, 1 - share / 2);
        for (std::size_t h = 0; h < heads; ++h) {
          bool row_unsure = false;
          Row wanted = x[h];
          for (std::size_t d = 0; d < dim; ++d, ++numbers) {
            const std::size_t at = (layer * heads + h) * dim + d;
            const auto threshold = [&](const char* name) {
              return double{p.at(name + std::string(how.outliers ? "" : "_all")).values[at]};
            };
            bool here = false;
            wanted[d] = coded(x[h][d], by_channel ? threshold("key_lower") : low,
                              by_channel ? threshold("key_upper") : high, book, how.outliers, &here);
            row_unsure = row_unsure || here;
            exact += wanted[d] == x[h][d];
          }
          unsure += row_unsure;
          if (row_unsure) continue;
          if (key) wanted = turned(wanted, run.rope(), static_cast<double>(t));
          for (std::size_t d = 0; d < dim; ++d)
            differ += !(std::abs(double{got[key ? 0 : 1][h][t][d]} - wanted[d]) <= 1e-5 * (1 + std::abs(wanted[d])));
        }
      }
  }
  CHECK(differ == 0);
  CHECK(unsure * dim < numbers / 20);  // nearly all rows are compared
  if (how.outliers) {
    CHECK(exact > numbers / 40);
    CHECK(exact < numbers / 8);
  }
}

}  // namespace

TEST_CASE("kvquant stores of real text what a plain implementation stores") {
  const auto how =
      GENERATE(Setting{}, Setting{.bits = 4, .dense = 5}, Setting{.bits = 2}, Setting{.bits = 2, .q_norm = false},
               Setting{.outliers = false}, Setting{.nonuniform = false},
               Setting{.outliers = false, .nonuniform = false}, Setting{.calibration = false});
  CAPTURE(how.bits, how.q_norm, how.outliers, how.nonuniform, how.calibration, how.dense);
  OnText run = run_with(how.params(), how.calibration ? OnText::MakeProfile(calibrated) : OnText::MakeProfile());
  run.prefill(prompt);
  for (int i = 0; i < steps; ++i) run.step();
  compare(run, how, how.dense, prompt);
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      CAPTURE(layer, head);
      CHECK(run.kept(layer, head) == positions_to(prompt + steps));
      const auto h = static_cast<std::size_t>(head);
      std::size_t wrong = 0;
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        const auto got = run.stored(side, layer, head);
        const auto& seen = (side == KvSide::key ? run.layer(layer).keys : run.layer(layer).values).at;
        for (std::size_t t = 0; t < got.size(); ++t)
          if (t < how.dense || t >= prompt) wrong += Row(got[t].begin(), got[t].end()) != seen[t][h];
      }
      CHECK(wrong == 0);
    }
}

TEST_CASE("kvquant: each step codes its token, and leaves the rest alone") {
  constexpr int second = 40, all = prompt + steps + second;
  const auto how = GENERATE(Setting{}, Setting{.bits = 2, .dense = prompt + 1}, Setting{.calibration = false});
  CAPTURE(how.bits, how.calibration, how.dense);
  ParamMap params = how.params();
  params["generated"] = true;
  const OnText::MakeProfile make = how.calibration ? OnText::MakeProfile(calibrated) : OnText::MakeProfile();
  OnText run = run_with(params, make, all), twin = run_with(params, make, all);
  run.prefill(prompt), twin.prefill(prompt);
  for (int i = 0; i < steps; ++i) run.step();
  twin.step();
  compare(run, how, how.dense, prompt + steps);
  const auto same = [&](const OnText& before, std::size_t tokens) {
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head)
        for (const KvSide side : {KvSide::key, KvSide::value}) {
          CAPTURE(layer, head);
          auto now = run.stored(side, layer, head), then = before.stored(side, layer, head);
          now.resize(tokens), then.resize(tokens);
          CHECK(now == then);
        }
  };
  same(twin, prompt + 1);
  for (int i = 1; i < steps; ++i) twin.step();
  run.prefill(second);  // a later prompt's end does not code them again
  same(twin, prompt + steps);
  compare(run, how, std::max<std::size_t>(prompt + steps, how.dense), all);
}

TEST_CASE("kvquant: a second prompt's end codes what came since the first one's, and leaves the rest alone") {
  constexpr int second = 40, all = prompt + steps + second;
  const Setting how{.dense = static_cast<std::size_t>(GENERATE(0, 130))};
  OnText run = run_with(how.params(), calibrated, all), first = run_with(how.params(), calibrated, all);
  first.prefill(prompt);
  run.prefill(prompt);
  for (int i = 0; i < steps; ++i) run.step();
  run.prefill(second);
  compare(run, how, std::max<std::size_t>(prompt, how.dense), all);
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head)
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        CAPTURE(layer, head);
        auto before = run.stored(side, layer, head);
        before.resize(prompt);
        CHECK(before == first.stored(side, layer, head));
      }
}

TEST_CASE("kvquant: what it cannot use is refused") {
  using Catch::Contains;
  const auto changed = [](const std::function<void(Profile&)>& change) {
    return [change](int layers, int kv_heads) {
      Profile p = calibrated(layers, kv_heads);
      change(p);
      return p;
    };
  };
  for (const int bits : {1, 5})
    CHECK_THROWS_WITH(run_with({{"bits", std::int64_t{bits}}}), Contains("kvquant.bits: got " + std::to_string(bits)));
  CHECK_THROWS_WITH(run_with({{"outlier_share", 1.}}), Contains("got outlier_share 1, wanted less"));
  CHECK_THROWS_WITH(run_with({{"dense_tokens", std::int64_t{-1}}}), Contains("kvquant.dense_tokens: got -1"));
  CHECK_THROWS_WITH(run_with({{"outlier_share", .02}}),
                    Contains("got a profile of outlier_share 0.05") && Contains("wanted that of the policy, 0.02"));
  CHECK_THROWS_WITH(run_with({}, {}), Contains("got no profile for 'kvquant'"));
  CHECK_THROWS_WITH(run_with({}, changed([](Profile& p) { p.erase("key_lower"); })),
                    Contains("got a profile without an array that the plugin reads"));
  CHECK_THROWS_WITH(run_with({}, changed([](Profile& p) { std::swap(p["key_lower"], p["key_upper"]); })),
                    Contains("of a key channel, wanted finite ones in order"));
  for (const float bad : {NAN, -INFINITY})
    CHECK_THROWS_WITH(run_with({}, changed([&](Profile& p) { p["key_lower"].values[3] = bad; })),
                      Contains("of a key channel, wanted finite ones in order"));
  CHECK_THROWS_WITH(run_with({}, changed([](Profile& p) { p["value_codebook"].values[40] = NAN; })),
                    Contains("got an entry nan of a codebook"));
  for (const char* name : {"key_lower", "key_upper", "key_codebook", "value_codebook"}) {
    CAPTURE(name);
    CHECK_THROWS_WITH(run_with({}, changed([&](Profile& p) { p[name].values.pop_back(); })),
                      Contains("numbers, wanted") && Contains("those of kvquant_codebooks for this model"));
  }
  CHECK_THROWS_WITH(OnText(Role::policy, "kvquant", {{"calibration", false}}, 16, 64, 16),
                    Contains("got a budget for a policy that decides"));
}
