#include <kvlab/hashes.hpp>

#include <cmath>
#include <cstdint>
#include <numbers>

#include "ops/attend/attend.hpp"
#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Vector = std::vector<double>;

// The chance of collisions in two or more tables, as the paper's equation has it.
double chance_of(double cosine, int bits, int tables) {
  const double p = std::pow(1 - std::acos(std::min(1., std::max(-1., cosine))) / std::numbers::pi, bits);
  return 1 - std::pow(1 - p, tables) - tables * p * std::pow(1 - p, tables - 1);
}

double cosine(const Vector& a, const Vector& b) { return dot(a, b) / std::sqrt(dot(a, a) * dot(b, b)); }

// A head's hashed keys, less their mean, in f32.
std::vector<Vector> centred(const SeenRows& keys, int head, int from, int to) {
  const auto key = [&](int t) { return keys.at[static_cast<std::size_t>(t)][static_cast<std::size_t>(head)]; };
  Vector mean(key(0).size());
  for (int t = from; t < to; ++t)
    for (std::size_t d = 0; d < mean.size(); ++d) mean[d] += key(t)[d];
  std::vector<Vector> out;
  for (std::size_t t = 0; t < keys.at.size(); ++t) {
    out.push_back(key(static_cast<int>(t)));
    for (std::size_t d = 0; d < mean.size(); ++d)
      out.back()[d] = static_cast<float>(out.back()[d]) - static_cast<float>(mean[d] / (to - from));
  }
  return out;
}

// One number for each table: planes [element][bit][table] of the head.
std::vector<int> codes_of(const Vector& x, const float* planes, int bits, int tables) {
  std::vector<int> codes(static_cast<std::size_t>(tables));
  for (int table = 0; table < tables; ++table)
    for (int bit = 0; bit < bits; ++bit) {
      double side = 0;
      for (std::size_t d = 0; d < x.size(); ++d)
        side += x[d] * double{planes[(static_cast<int>(d) * bits + bit) * tables + table]};
      if (side > 0) codes[static_cast<std::size_t>(table)] += 1 << bit;
    }
  return codes;
}

// A cache of one head whose hashed keys are all of its tokens, and the hashes of a seed.
struct Sampled {
  PagedFixture cache;
  int tokens = 0;
  std::vector<std::int16_t> code;
  std::vector<float> mean, planes, weights;
  std::vector<std::int32_t> bound = {0, 0};
  HeapWorkspace workspace;

  explicit Sampled(const std::vector<std::vector<float>>& keys, const std::vector<std::vector<float>>& values)
      : cache({1, 1, 16, 16, 8}), tokens(static_cast<int>(keys.size())), mean(16) {
    for (int t = 0; t < tokens; ++t)
      cache.append(0, 0, keys[static_cast<std::size_t>(t)], values[static_cast<std::size_t>(t)], t);
  }
  Scores weigh(const std::vector<float>& query, const HashRule& rule, int least = 2) {
    planes = hash_planes(rule, 0, 1, 16);
    code.assign(static_cast<std::size_t>(tokens * rule.tables), 0);
    weights.assign(static_cast<std::size_t>(tokens), -1);
    KeyHashes h;
    h.code = View<std::int16_t, 4>::dense(code.data(), {1, 1, tokens, rule.tables});
    h.mean = View<float, 3>::dense(mean.data(), {1, 1, 16});
    h.bound = View<std::int32_t, 3>::dense(bound.data(), {1, 1, 2});
    h.planes = View<const float, 4>::dense(planes.data(), {1, 16, rule.bits, rule.tables});
    ops::hash_keys(cache.view(), 0, tokens, h, Stream::cpu());
    const Scores out = Scores::dense(weights.data(), {1, 1, tokens});
    ops::collision_weights(cache.view(), View<const float, 3>::dense(query.data(), {1, 1, 16}), {.least = least}, h,
                           out, workspace, Stream::cpu());
    return out;
  }
};

std::vector<float> at_angle(double degrees) {
  std::vector<float> x(16, 0.f);
  x[0] = static_cast<float>(std::cos(degrees * std::numbers::pi / 180));
  x[1] = static_cast<float>(std::sin(degrees * std::numbers::pi / 180));
  return x;
}

}  // namespace

// Two keys whose mean is 0: the first lies at the angle, the second opposite.
TEST_CASE("magicpig: the card's chances, from the weight of a sampled token") {
  struct Known {
    double degrees;
    int bits, tables;
    double chance;
  };
  for (const auto& [degrees, bits, tables, chance] :
       {Known{90, 1, 2, .25}, Known{60, 10, 150, .7356}, Known{30, 10, 150, 1}}) {
    CAPTURE(degrees, bits, tables);
    CHECK(chance_of(std::cos(degrees * std::numbers::pi / 180), bits, tables) == Approx(chance).margin(1e-4));
    Sampled s({at_angle(degrees), at_angle(degrees + 180)}, {at_angle(0), at_angle(0)});
    float weight = 0;
    std::uint64_t seed = 0;
    while (weight == 0 && seed < 100) weight = s.weigh(at_angle(0), {bits, tables, seed++})(0, 0, 0);
    REQUIRE(weight > 0);
    CHECK(1 / double{weight} - 1e-4 == Approx(chance).margin(1e-4));
  }
}

// The keys are around one direction, as those of models are. Their mean makes the angles wide.
TEST_CASE("magicpig: the mean over seeds is full attention, within what the chances allow") {
  constexpr int tokens = 48, seeds = 1500;
  const HashRule rule{2, 8, 0};
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> keys, values;
  for (int t = 0; t < tokens; ++t) {
    keys.emplace_back(), values.emplace_back();
    for (int d = 0; d < 16; ++d)
      keys.back().push_back(normal(rng) + (d == 3 ? 8 : 0)), values.back().push_back(normal(rng));
  }
  std::vector<float> query;
  for (int d = 0; d < 16; ++d) query.push_back(normal(rng));
  Vector of_query(query.begin(), query.end()), mean(16);
  for (const auto& key : keys)
    for (std::size_t d = 0; d < 16; ++d) mean[d] += double{key[d]} / tokens;
  // What each token adds to the softmax's sum, the mean of its weight, and how far one draw strays from that.
  Vector share, wanted, strays;
  for (const auto& key : keys) {
    Vector own(key.begin(), key.end()), less_mean(16);
    for (std::size_t d = 0; d < 16; ++d) less_mean[d] = own[d] - mean[d];
    const double chance = chance_of(cosine(of_query, less_mean), rule.bits, rule.tables);
    REQUIRE(chance > .01);  // so that the sum of draws is about normal
    share.push_back(std::exp(dot(of_query, own) / 4));
    wanted.push_back(chance / (chance + 1e-4));
    strays.push_back(std::sqrt(chance * (1 - chance)) / (chance + 1e-4));
  }
  Sampled s(keys, values);
  Vector weights(tokens), top(16);
  double sum = 0;
  Guarded<3> out({1, 1, 16});
  Guarded<2> lse({1, 1});
  for (int seed = 0; seed < seeds; ++seed) {
    const Scores bias = s.weigh(query, {rule.bits, rule.tables, static_cast<std::uint64_t>(seed)});
    for (int t = 0; t < tokens; ++t) {
      weights[static_cast<std::size_t>(t)] += double{bias(0, 0, t)} / seeds;
      bias(0, 0, t) = std::log(bias(0, 0, t));
    }
    ops::AttendArgs a;
    a.kv = s.cache.view(), a.queries = View<const float, 3>::dense(query.data(), {1, 1, 16}), a.bias = bias;
    a.out = out.view(), a.lse = lse.view();
    ops::attend(a, s.workspace, Stream::cpu());
    const double of_seed = std::exp(double{lse(0, 0)});
    sum += of_seed / seeds;
    for (int d = 0; d < 16; ++d) top[static_cast<std::size_t>(d)] += of_seed * double{out(0, 0, d)} / seeds;
  }
  const double of_mean = 5 / std::sqrt(double{seeds});  // five standard deviations of a mean
  double full = 0, allowed = 0;
  for (std::size_t t = 0; t < tokens; ++t) {
    CAPTURE(t, wanted[t]);
    CHECK(std::abs(weights[t] - wanted[t]) < of_mean * strays[t] + 1e-5);
    full += share[t];
    // One seed's draws may stray together. What the floor takes away is known.
    allowed += share[t] * (of_mean * strays[t] + 1 - wanted[t] + 1e-5);
  }
  CHECK(std::abs(sum - full) < allowed);
  CHECK(allowed < .25 * full);  // the bound says something
  for (std::size_t d = 0; d < 16; ++d) {
    double full_top = 0, allowed_top = 0;
    for (std::size_t t = 0; t < tokens; ++t) {
      const double value = double{values[t][d]};
      full_top += share[t] * value;
      allowed_top += share[t] * std::abs(value) * (of_mean * strays[t] + 1 - wanted[t] + 1e-5);
    }
    CHECK(std::abs(top[d] - full_top) < allowed_top);
  }
}

TEST_CASE("magicpig samples on real text what a plain implementation samples, and weighs it so") {
  constexpr int prompt = 150, steps = 6, sinks = 3, window = 20, seed = 11;
  const auto [bits, tables] = GENERATE(std::pair{10, 150}, std::pair{5, 24});
  const bool corrects = bits == 10;
  CAPTURE(bits, tables);
  OnText run(Role::policy, "magicpig",
             {{"bits", std::int64_t{bits}},
              {"tables", std::int64_t{tables}},
              {"sinks", std::int64_t{sinks}},
              {"window", std::int64_t{window}},
              {"full_layers", std::string("1,40")},
              {"seed", std::int64_t{seed}},
              {"correction", corrects}},
             0, prompt + steps, 8);
  // A second prompt of the sequence, after two steps, hashes all of its tokens anew.
  const std::size_t before = GENERATE(0, 2);
  CAPTURE(before);
  if (before > 0) {
    run.prefill(90);
    for (std::size_t i = 0; i < before; ++i) run.step();
  }
  run.prefill(before > 0 ? prompt - 90 - static_cast<int>(before) : prompt);
  for (int step = 0; step < steps; ++step) run.step();
  const int group = run.group(), dim = run.config().head_dim;
  const std::vector<float> planes =
      hash_planes({bits, tables, seed}, 0, run.config().kv_heads, dim);  // fewer than 16 layers share these
  std::size_t sampled = 0, left_out = 0;
  for (int layer = 0; layer < run.config().layers; ++layer)
    for (int head = 0; head < run.config().kv_heads; ++head) {
      const auto& here = run.layer(layer);
      if (layer == 1) {
        for (const auto& read : here.read) CHECK(read.empty());
        continue;
      }
      const std::vector<Vector> keys = centred(here.keys, head, sinks, prompt - window);
      const float* of_head = planes.data() + std::ptrdiff_t{head} * dim * bits * tables;
      std::vector<std::vector<int>> codes;
      for (int t = 0; t < prompt - window; ++t)
        codes.push_back(codes_of(keys[static_cast<std::size_t>(t)], of_head, bits, tables));
      for (int step = 0; step < steps; ++step) {
        CAPTURE(layer, head, step);
        std::vector<bool> read(static_cast<std::size_t>(prompt + step + 1));
        for (int g = 0; g < group; ++g) {
          const auto query_head = static_cast<std::size_t>(head * group + g);
          const Vector& q = here.queries.at[static_cast<std::size_t>(prompt + step)][query_head];
          const std::vector<int> wanted = codes_of(q, of_head, bits, tables);
          Vector out(static_cast<std::size_t>(dim));
          double sum = 0;
          for (int t = 0; t <= prompt + step; ++t) {
            const auto at = static_cast<std::size_t>(t);
            double weight = 1;
            if (t >= sinks && t < prompt - window) {
              int equal = 0;
              for (int i = 0; i < tables; ++i)
                equal += codes[at][static_cast<std::size_t>(i)] == wanted[static_cast<std::size_t>(i)];
              equal < 2 ? ++left_out : ++sampled;
              if (equal < 2) continue;
              if (corrects) weight = 1 / (chance_of(cosine(q, keys[at]), bits, tables) + 1e-4);
            }
            read[at] = true;
            // The paper centres all keys, so this does.
            const double share = weight * std::exp(dot(q, keys[at]) / std::sqrt(static_cast<double>(dim)));
            sum += share;
            for (std::size_t d = 0; d < out.size(); ++d)
              out[d] += share * here.values.at[at][static_cast<std::size_t>(head)][d];
          }
          const Vector& got = here.outputs.at[before + static_cast<std::size_t>(step)][query_head];
          double difference = 0, size = 0;
          for (std::size_t d = 0; d < out.size(); ++d) {
            difference += std::pow(got[d] - out[d] / sum, 2);
            size += std::pow(out[d] / sum, 2);
          }
          CHECK(std::sqrt(difference) <= 1e-4 * std::sqrt(size));
        }
        std::vector<int> places;
        for (std::size_t t = 0; t < read.size(); ++t)
          if (read[t]) places.push_back(static_cast<int>(t));
        CHECK(here.read[before + static_cast<std::size_t>(step)][static_cast<std::size_t>(head)] == places);
      }
      CHECK(run.kept(layer, head) == positions_to(prompt + steps));
    }
  CHECK(sampled > 0);
  CHECK(left_out > sampled / 10);
}

TEST_CASE("magicpig: no bits and short prompts are full attention, and what it cannot obey is refused") {
  const auto read = [](int of_prompt, int bits) {
    OnText run(Role::policy, "magicpig", {{"bits", std::int64_t{bits}}, {"window", std::int64_t{16}}}, 0, 64, 8);
    run.prefill(of_prompt);
    run.step();
    const auto& lists = run.layer(2).read[0];
    return lists.empty() ? std::size_t(of_prompt + 1) : lists[0].size();
  };
  CHECK(read(40, 0) == 41);
  CHECK(read(1, 10) == 2);
  CHECK(read(20, 10) == 21);
  const auto with = [](const char* name, const ParamValue& value) {
    OnText(Role::policy, "magicpig", {{name, value}}, 0, 64, 8);
  };
  CHECK_THROWS_WITH(with("bits", std::int64_t{16}), Catch::Contains("bits"));
  CHECK_THROWS_WITH(with("tables", std::int64_t{0}), Catch::Contains("tables"));
  CHECK_THROWS_WITH(with("window", std::int64_t{0}), Catch::Contains("window"));
  CHECK_THROWS_WITH(with("tables", std::int64_t{5000}), Catch::Contains("tables"));
  CHECK_THROWS_WITH(with("collisions", std::int64_t{65}), Catch::Contains("collisions"));
  CHECK_THROWS_WITH(
      OnText(Role::policy, "magicpig", {{"collisions", std::int64_t{51}}, {"tables", std::int64_t{50}}}, 0, 64, 8),
      Catch::Contains("got collisions 51, wanted at most 50"));
  for (const char* text : {"0,,2", "-1", "1,", "a", "0;16"})
    CHECK_THROWS_WITH(with("full_layers", std::string(text)), Catch::Contains("got full_layers"));
  CHECK_THROWS_WITH(with("full_layers", std::string("0,1,2,3,4,5,6,7,8,9,10,11,12")),
                    Catch::Contains("wanted at least one layer that samples"));
  CHECK_THROWS_WITH(OnText(Role::policy, "magicpig", {}, 32, 64, 8), Catch::Contains("got a budget for a policy"));
}
