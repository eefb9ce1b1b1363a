#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr int page = 8, prompt = 190, steps = 40, sinks = 10, first = 16, window = 30, block = 16, few = 3, top = 2;
constexpr int longest = 300;               // text
constexpr int least = first + 48 + block;  // 30 + 15 tokens lie in six pages at most

std::map<std::string, ParamValue> params(std::map<std::string, ParamValue> more = {}) {
  more.insert({{"sinks", std::int64_t{sinks}},
               {"window", std::int64_t{window}},
               {"block", std::int64_t{block}},
               {"top", std::int64_t{top}},
               {"representatives", std::int64_t{few}}});
  return more;
}

using Vector = std::vector<double>;

// Blocks of a layer, by the card. Block b has the text positions from `first + b * block` on.
struct Plain {
  const OnText& run;
  int layer, of_block = few;
  bool clamped = true;
  std::vector<Vector> mass{};               // [query head][text position]
  std::vector<std::vector<Vector>> keys{};  // [block][query head]

  std::size_t heads() const { return static_cast<std::size_t>(run.config().heads); }
  const Vector& key(int position, std::size_t query_head) const {
    return run.layer(layer)
        .keys.at[static_cast<std::size_t>(position)][query_head / static_cast<std::size_t>(run.group())];
  }
  // A key or query whose text position is so many places further.
  Vector turned(const Vector& x, int places) const {
    Vector out(x.size());
    for (std::size_t i = 0, half = x.size() / 2; i < half; ++i) {
      const double angle = places * double{run.rope().inv_freq[i]};
      out[i] = x[i] * std::cos(angle) - x[i + half] * std::sin(angle);
      out[i + half] = x[i + half] * std::cos(angle) + x[i] * std::sin(angle);
    }
    return out;
  }
  // The query at this text position attends to the tokens `read`. `furthest`: the greatest distance that counts.
  // Returns what it reads, of each query head.
  std::vector<Vector> attend(int position, const std::vector<int>& read, int furthest = longest) {
    mass.resize(heads(), Vector(longest));
    std::vector<Vector> out;
    for (std::size_t h = 0; h < heads(); ++h) {
      const Vector& q = run.layer(layer).queries.at[static_cast<std::size_t>(position)][h];
      Vector logits;
      for (const int t : read)
        logits.push_back(dot(q, turned(key(t, h), std::max(0, position - furthest - t))) /
                         std::sqrt(static_cast<double>(q.size())));
      const Vector shares = softmax(logits);
      out.emplace_back(q.size());
      for (std::size_t i = 0; i < read.size(); ++i) {
        const auto t = static_cast<std::size_t>(read[i]);
        if (read[i] > position - window) mass[h][t] += shares[i];
        const auto& value = run.layer(layer).values.at[t][h / static_cast<std::size_t>(run.group())];
        for (std::size_t d = 0; d < q.size(); ++d) out[h][d] += shares[i] * value[d];
      }
    }
    return out;
  }
  void make_blocks(int tokens) {
    for (int from = first + static_cast<int>(keys.size()) * block; from + block + window <= tokens; from += block) {
      auto& of_heads = keys.emplace_back();
      for (std::size_t h = 0; h < heads(); ++h) {
        std::vector<int> positions;
        for (int t = from; t < from + block; ++t) positions.push_back(t);
        Vector mean(key(0, 0).size());
        for (const int t : best({mass[h].begin() + from, mass[h].begin() + from + block}, positions,
                                static_cast<std::size_t>(of_block)))
          for (std::size_t d = 0; d < mean.size(); ++d) mean[d] += turned(key(t, h), clamped ? -t : 0)[d] / of_block;
        of_heads.push_back(mean);
      }
    }
  }
  // What the queries at text positions from `from` to `position` read together, by their mean.
  std::vector<int> pages(int from, int position, std::size_t blocks) const {
    Vector scores;
    std::vector<int> all;
    for (std::size_t b = 0; b < keys.size(); ++b) {
      all.push_back(static_cast<int>(b));
      scores.push_back(0);
      for (int i = from; i <= position; ++i)
        for (std::size_t h = 0; h < heads(); ++h)
          scores.back() +=
              dot(turned(run.layer(layer).queries.at[static_cast<std::size_t>(i)][h], clamped ? window - i : 0),
                  keys[b][h]) /
              (position + 1 - from);
    }
    const std::vector<int> chosen = best(scores, all, std::min(blocks, all.size()));
    std::vector<int> read;
    for (int p = 0; p <= position / page; ++p) {
      const int at = p * page - first, b = at / block;
      if (at < 0 || b >= static_cast<int>(keys.size()) || std::count(chosen.begin(), chosen.end(), b))
        read.push_back(p);
    }
    return read;
  }
};

std::vector<int> tokens_of(const std::vector<int>& pages, int position) {
  std::vector<int> tokens;
  for (const int p : pages)
    for (int t = p * page; t < std::min((p + 1) * page, position + 1); ++t) tokens.push_back(t);
  return tokens;
}

struct Part {
  int prompt, steps;
};

// A prompt of so many tokens that begins at a text position, in chunks; 0 = all of it attends to everything. `before`:
// tokens of prompts that came before it.
void check_prompt(Plain& plain, int from, int tokens, int before, int chunk, std::size_t blocks, int furthest) {
  const auto& got = plain.run.layer(plain.layer).prompt_outputs.at;
  for (int at = 0; at<tokens; at += chunk> 0 ? chunk : tokens) {
    const int end = chunk > 0 ? std::min(tokens, at + chunk) : tokens, last = from + end - 1;
    const bool chooses = chunk > 0 && from + end > window;
    const std::vector<int> pages = chooses ? plain.pages(from + at, last, blocks) : positions_to(last / page + 1);
    for (int i = at; i < end; ++i) {
      CAPTURE(i, plain.layer);
      const auto outputs = plain.attend(from + i, tokens_of(pages, from + i), chooses ? furthest : longest);
      for (std::size_t h = 0; h < outputs.size(); ++h)
        for (std::size_t d = 0; d < outputs[h].size(); ++d)
          CHECK(got[static_cast<std::size_t>(before + i)][h][d] == Approx(outputs[h][d]).margin(1e-4));
    }
    plain.make_blocks(from + end);
  }
}

void check_reads(std::map<std::string, ParamValue> given, int of_block, int budget, std::size_t blocks,
                 bool clamped = true, const std::vector<Part>& parts = {{prompt, steps}}) {
  const int furthest = given.contains("positions") ? longest : window;
  const int chunk = given.contains("prompt_retrieval") ? 0
                    : given.contains("prompt_chunk")   ? static_cast<int>(std::get<std::int64_t>(given["prompt_chunk"]))
                                                       : 512;
  OnText run(Role::policy, "infllm", params(std::move(given)), budget, longest, page);
  std::vector<Plain> layers;
  for (int layer = 0; layer < run.config().layers; ++layer) layers.push_back(Plain{run, layer, of_block, clamped});
  int position = 0, step = 0, before = 0;
  for (const Part& part : parts) {
    run.prefill(part.prompt);
    for (Plain& plain : layers) {
      check_prompt(plain, position, part.prompt, before, chunk, blocks, furthest);
      REQUIRE(static_cast<int>(plain.keys.size()) == (position + part.prompt - first - window) / block);
    }
    position += part.prompt, before += part.prompt;
    for (const int end = step + part.steps; step < end; ++step, ++position) {
      run.step();
      for (Plain& plain : layers) {
        CAPTURE(step, plain.layer);
        plain.make_blocks(position + 1);
        const std::vector<int> wanted = plain.pages(position, position, blocks);
        const auto& read = run.layer(plain.layer).read[static_cast<std::size_t>(step)];
        for (int head = 0; head < run.config().kv_heads; ++head) {
          CHECK(read[static_cast<std::size_t>(head)] == wanted);
          if (budget == 0) continue;
          const auto on = run.pages_on(Tier::device, plain.layer, head);
          CHECK(std::includes(on.begin(), on.end(), wanted.begin(), wanted.end()));
          CHECK(static_cast<int>(on.size()) <= budget / page);
          CHECK(static_cast<int>(run.pages_on(Tier::host, plain.layer, head).size()) >= position / page);
        }
        const auto outputs = plain.attend(position, tokens_of(wanted, position), furthest);
        const auto& got = run.layer(plain.layer).outputs.at[static_cast<std::size_t>(step)];
        for (std::size_t h = 0; h < outputs.size(); ++h)
          for (std::size_t d = 0; d < outputs[h].size(); ++d) CHECK(got[h][d] == Approx(outputs[h][d]).margin(1e-4));
      }
    }
  }
}

}  // namespace

TEST_CASE("infllm reads on real text what a plain implementation reads") {
  check_reads({}, few, least + block, 2);
  check_reads({}, few, least, 1);  // the budget has room for one block
  check_reads({{"top", std::int64_t{3}}}, few, 0, 3);
  check_reads({{"local_scores", false}}, block, least + block, 2);
  check_reads({{"clamped_scores", false}}, few, least + block, 2, false);
  check_reads({{"positions", std::string("original")}}, few, least + block, 2);
  check_reads({{"positions", std::string("original")}, {"clamped_scores", false}}, few, 0, 2, false);
  check_reads({{"prompt_retrieval", false}}, few, least + block, 2);
}

TEST_CASE("infllm: chunks of a prompt read on real text what a plain implementation reads") {
  for (const std::int64_t chunk : {1, 17, 40}) {
    CAPTURE(chunk);
    check_reads({{"prompt_chunk", chunk}}, few, least + block, 2);
  }
  const std::int64_t chunk = 24;
  check_reads({{"prompt_chunk", chunk}}, few, least, 1);
  check_reads({{"prompt_chunk", chunk}, {"clamped_scores", false}}, few, least + block, 2, false);
  check_reads({{"prompt_chunk", chunk}, {"positions", std::string("original")}}, few, 0, 2);
  check_reads({{"prompt_chunk", chunk}, {"local_scores", false}}, block, least + block, 2);
  check_reads({{"prompt_chunk", chunk}}, few, least + block, 2, true, {{prompt, 20}, {45, 30}});
}

TEST_CASE("infllm: a second prompt adds to the sums of tokens, and blocks that have vectors keep them") {
  check_reads({}, few, 0, 2, true, {{prompt, 20}, {45, 30}});
  check_reads({}, few, least + block, 2, true, {{prompt, 20}, {45, 30}});
}

TEST_CASE("infllm: sinks and window are the whole text, and the result is that of full attention") {
  OnText run(Role::policy, "infllm", params({{"positions", std::string("original")}}), 0, first + window, page);
  OnText full(Role::policy, "infllm", params({{"window", std::int64_t{1000}}}), 0, first + window, page);
  for (OnText* x : {&run, &full}) {
    x->prefill(20);
    for (int step = 20; step < first + window; ++step) x->step();
  }
  for (int layer = 0; layer < run.config().layers; ++layer) {
    const auto& outputs = run.layer(layer).outputs.at;
    CHECK(outputs == full.layer(layer).outputs.at);
    for (int step = 0; step < first + window - 20; ++step)
      CHECK(tokens_of(run.layer(layer).read[static_cast<std::size_t>(step)][0], 20 + step) == positions_to(21 + step));
    // Attention to all tokens, in double precision.
    for (int i : {20, first + window - 1})
      for (int h = 0; h < run.config().heads; ++h) {
        const Vector& q = run.layer(layer).queries.at[static_cast<std::size_t>(i)][static_cast<std::size_t>(h)];
        const auto kv_head = static_cast<std::size_t>(h / run.group());
        Vector logits;
        for (int t = 0; t <= i; ++t)
          logits.push_back(dot(q, run.layer(layer).keys.at[static_cast<std::size_t>(t)][kv_head]) /
                           std::sqrt(static_cast<double>(q.size())));
        const Vector shares = softmax(logits);
        for (std::size_t d = 0; d < q.size(); ++d) {
          double sum = 0;
          for (std::size_t t = 0; t < shares.size(); ++t) sum += shares[t] * run.layer(layer).values.at[t][kv_head][d];
          CHECK(outputs[static_cast<std::size_t>(i - 20)][static_cast<std::size_t>(h)][d] == Approx(sum).margin(1e-4));
        }
      }
  }
}

TEST_CASE("infllm: a text of the window's length has the positions that it has") {
  OnText run(Role::policy, "infllm", params(), 0, longest, page);
  OnText original(Role::policy, "infllm", params({{"positions", std::string("original")}}), 0, longest, page);
  for (OnText* x : {&run, &original}) {
    x->prefill(20);
    for (int step = 20; step < window + 3; ++step) x->step();
  }
  // The query at place `window` is the first one for which the first token lies at the window's end.
  for (int step = 0; step < window + 3 - 20; ++step) {
    const auto of = [&](OnText& x) { return x.layer(0).outputs.at[static_cast<std::size_t>(step)]; };
    CAPTURE(step);
    CHECK((of(run) == of(original)) == (step + 20 <= window));
  }
}

TEST_CASE("infllm: what it cannot obey is refused") {
  const auto make = [](std::map<std::string, ParamValue> more, int budget = 0) {
    OnText(Role::policy, "infllm", params(std::move(more)), budget, 256, page);
  };
  const auto attach = [](const BudgetAmount& budget) {
    Registry registry;
    const PluginInfo& info = registry.require(Role::policy, "infllm");
    const auto policy = create<Policy>(info, resolve(info, params()));
    Shape shape;
    shape.layers = shape.max_slots = 1, shape.query_heads = shape.kv_heads = 4, shape.head_dim = 8;
    shape.page_size = page, shape.max_tokens = 256;
    HeapWorkspace w;
    policy->attach(shape, budget, w);
  };
  CHECK_THROWS_WITH(attach({BudgetAmount::ratio, .5}),
                    Catch::Contains("got a budget as a ratio of the text, wanted tokens"));
  CHECK_THROWS_WITH(attach({BudgetAmount::bytes, 1e6}), Catch::Contains("got a budget in bytes, wanted tokens"));
  CHECK_NOTHROW(attach({BudgetAmount::ratio, 1}));
  CHECK_THROWS_WITH(make({{"window", std::int64_t{1} << 25}}), Catch::Contains("infllm.window: got"));
  CHECK_THROWS_WITH(make({}, least - 1), Catch::Contains("wanted at least " + std::to_string(least)));
  CHECK_NOTHROW(make({}, least));
  CHECK_THROWS_WITH(make({{"block", std::int64_t{12}}}),
                    Catch::Contains("got blocks of 12 tokens, wanted whole pages of 8"));
  CHECK_THROWS_WITH(make({{"representatives", std::int64_t{17}}}),
                    Catch::Contains("got 17 representatives, wanted at most 16"));
}
