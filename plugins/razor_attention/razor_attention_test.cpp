#include "retrieval_heads.hpp"

#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int prompt = 200, steps = 40, sinks = 4, window = 30;

float echo(int layer, int head) { return static_cast<float>((layer * 3 + head * 8) % 13) / 13; }
float induction(int layer, int head) { return static_cast<float>((layer * 5 + head * 4) % 11) / 11; }

Profile scores(int layers, int kv_heads) {
  ProfileArray of_echo{{layers, kv_heads}, {}, ""}, of_induction = of_echo;
  for (int l = 0; l < layers; ++l)
    for (int h = 0; h < kv_heads; ++h)
      of_echo.values.push_back(echo(l, h)), of_induction.values.push_back(induction(l, h));
  return {{"echo", of_echo}, {"induction", of_induction}};
}

std::map<std::string, ParamValue> params(std::map<std::string, ParamValue> more = {}) {
  more.insert({{"sinks", std::int64_t{sinks}}, {"window", std::int64_t{window}}, {"window_share", 0.}});
  return more;
}

std::vector<int> local(int seen, int newest) {
  std::vector<int> kept;
  for (int p = 0; p < seen; ++p)
    if (p < sinks || p >= seen - newest) kept.push_back(p);
  return kept;
}

}  // namespace

TEST_CASE("razor_attention: heads of both kinds, by hand") {
  using Marks = std::vector<bool>;
  Marks marks(8);
  razor_attention::mark({.1f, .4f, .2f, .4f, 0, .4f, .3f, .1f}, .25, marks);  // the first two of three equal ones
  CHECK(marks == Marks{false, true, false, true, false, false, false, false});
  razor_attention::mark({.1f, .9f, .2f, .4f, 0, .4f, .3f, .1f}, .1, marks);  // 0.8 rounds to 1, and it is there already
  CHECK(marks == Marks{false, true, false, true, false, false, false, false});
  razor_attention::mark({0, 0, 0, 0, 1, 0, 0, 0}, .06, marks);  // 0.48 rounds to none
  CHECK(marks == Marks{false, true, false, true, false, false, false, false});
  // The card: of 256 heads, 36 by induction and 3 by echo.
  std::vector<float> rising(256);
  for (std::size_t i = 0; i < rising.size(); ++i) rising[i] = static_cast<float>(i);
  Marks many(256);
  razor_attention::mark(rising, .14, many);
  CHECK(std::count(many.begin(), many.end(), true) == 36);
  std::reverse(rising.begin(), rising.end());
  razor_attention::mark(rising, .01, many);
  CHECK(std::count(many.begin(), many.end(), true) == 39);
}

TEST_CASE("razor_attention keeps on real text what a plain implementation keeps") {
  const double share = GENERATE(0., .2);
  const std::string what = GENERATE("default", "prompt alone", "no retrieval heads");
  CAPTURE(share, what);
  std::map<std::string, ParamValue> given{{"window_share", share}, {"induction", .3}, {"echo", .1}};
  if (what == "prompt alone") given["while_decoding"] = false;
  if (what == "no retrieval heads") given["retrieval_heads"] = false;
  OnText run(Role::policy, "razor_attention", params(given), 0, prompt + steps, 8,
             what == "no retrieval heads" ? OnText::MakeProfile() : scores);
  run.prefill(prompt);
  const int layers = run.config().layers, heads = run.config().kv_heads, all = layers * heads;
  const auto among = [&](auto score, int layer, int head, double of) {
    int before = 0;
    for (int l = 0; l < layers; ++l)
      for (int h = 0; h < heads; ++h)
        before += score(l, h) > score(layer, head) ||
                  (score(l, h) == score(layer, head) && l * heads + h < layer * heads + head);
    return before < std::lround(of * all);
  };
  int whole = 0, cut = 0;
  for (int seen = prompt; seen <= prompt + steps; ++seen) {
    for (int layer = 0; layer < layers; ++layer)
      for (int head = 0; head < heads; ++head) {
        CAPTURE(seen, layer, head);
        const bool retrieval =
            what != "no retrieval heads" && (among(induction, layer, head, .3) || among(echo, layer, head, .1));
        const int decided = what == "prompt alone" ? prompt : seen;
        const int newest = std::max(window, static_cast<int>(share * decided)) + seen - decided;
        (retrieval ? whole : cut) += 1;
        REQUIRE(run.kept(layer, head) == (retrieval ? positions_to(seen) : local(seen, newest)));
      }
    if (seen < prompt + steps) run.step();
  }
  CHECK((whole > 0) == (what != "no retrieval heads"));
  CHECK(cut > 0);
}

// The card's case: a capacity of 6 is 2 sinks, the compensation token and 3 newest tokens.
TEST_CASE("razor_attention: the card's case, and prompts within the capacity") {
  const std::map<std::string, ParamValue> given{
      {"sinks", std::int64_t{2}}, {"window", std::int64_t{3}}, {"window_share", 0.}, {"retrieval_heads", false}};
  const auto kept = [&](int tokens) {
    OnText run(Role::policy, "razor_attention", given, 0, 32, 8);
    run.prefill(tokens);
    return run.kept(0, 0);
  };
  CHECK(kept(10) == std::vector<int>{0, 1, 7, 8, 9});
  CHECK(kept(5) == positions_to(5));
  CHECK(kept(1) == positions_to(1));
}

TEST_CASE("razor_attention: the mean of what a head dropped counts as all of it, or once") {
  const bool once = GENERATE(false, true);
  const int left = GENERATE(200, 0);  // tokens that leave a prompt
  CAPTURE(once, left);
  const int tokens = sinks + window + left;
  OnText run(Role::policy, "razor_attention", params({{"retrieval_heads", false}, {"counts_once", once}}), 0, 256, 8);
  run.prefill(tokens);
  run.step();
  for (int layer = 0; layer < run.config().layers; ++layer) {
    const auto& seen = run.layer(layer);
    for (int h = 0; h < run.config().heads; ++h) {
      CAPTURE(layer, h);
      const auto head = static_cast<std::size_t>(h / run.group());
      const auto& q = seen.queries.at.back()[static_cast<std::size_t>(h)];
      std::vector<double> mean_key(q.size()), mean_value(q.size()), wanted(q.size());
      double all = 0;
      const auto add = [&](const std::vector<double>& key, const std::vector<double>& value, double weight) {
        const double share = weight * std::exp(dot(q, key) / std::sqrt(static_cast<double>(q.size())));
        all += share;
        for (std::size_t d = 0; d < q.size(); ++d) wanted[d] += share * value[d];
      };
      for (std::size_t t = 0; t <= static_cast<std::size_t>(tokens); ++t) {
        const auto &key = seen.keys.at[t][head], &value = seen.values.at[t][head];
        if (t < sinks || t >= static_cast<std::size_t>(sinks + left)) {
          add(key, value, 1);
          continue;
        }
        for (std::size_t d = 0; d < q.size(); ++d) mean_key[d] += key[d] / left, mean_value[d] += value[d] / left;
      }
      if (left > 0) add(mean_key, mean_value, once ? 1 : left);
      const auto& got = seen.outputs.at.back()[static_cast<std::size_t>(h)];
      double apart = 0, size = 0;
      for (std::size_t d = 0; d < q.size(); ++d)
        apart += (got[d] - wanted[d] / all) * (got[d] - wanted[d] / all), size += wanted[d] / all * wanted[d] / all;
      CHECK(std::sqrt(apart) <= 1e-4 * std::sqrt(size));
    }
  }
}

TEST_CASE("razor_attention: what it cannot use is refused") {
  const auto with = [](const OnText::MakeProfile& make) {
    return OnText(Role::policy, "razor_attention", params(), 0, 64, 8, make);
  };
  CHECK_THROWS_WITH(with([](int layers, int heads) {
                      Profile p = scores(layers, heads);
                      p["echo"].values.pop_back();
                      return p;
                    }),
                    Catch::Contains("scores in 'echo', wanted a number for each of"));
  CHECK_THROWS_WITH(with([](int layers, int heads) {
                      Profile p = scores(layers, heads);
                      p["induction"].values[2] = NAN;
                      return p;
                    }),
                    Catch::Contains("got the score nan of KV head 2 in 'induction'"));
  CHECK_THROWS_WITH(with([](int layers, int heads) {
                      Profile p = scores(layers, heads);
                      p.erase("echo");
                      return p;
                    }),
                    Catch::Contains("got a profile without an array that the plugin reads"));
  CHECK_THROWS_WITH(OnText(Role::policy, "razor_attention", params({{"retrieval_heads", false}}), 64, 100, 8),
                    Catch::Contains("got a budget for a policy that decides by itself"));
}
