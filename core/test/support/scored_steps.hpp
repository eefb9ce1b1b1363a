// A scorer over one sequence of one KV head, whose attention the test makes up.
#pragma once
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/on_text.hpp"

namespace kvlab::test {

class ScoredSteps {
 public:
  ScoredSteps(const std::string& name, const std::map<std::string, ParamValue>& params, int query_heads = 1) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::scorer, name);
    scorer_ = create<Scorer>(info, resolve(info, params));
    names_ = scorer_->needs().token_state();
    PagedOptions o{1, 1, 8, 4, 16};
    o.state_columns = static_cast<int>(names_.size());
    cache_ = std::make_unique<PagedFixture>(o);
    shape_.layers = shape_.max_slots = shape_.kv_heads = 1;
    shape_.query_heads = query_heads, shape_.head_dim = o.head_dim, shape_.page_size = o.page_size;
    shape_.max_tokens = o.page_size * o.max_pages;
    scorer_->attach(shape_, {}, workspace_);
  }

  // Appends tokens of zeros. Each of a prompt's queries attends to all that it sees alike.
  void prompt(int tokens, int budget = std::numeric_limits<std::int32_t>::max()) {
    append(tokens);
    budget_ = budget;
    queries_.assign(static_cast<std::size_t>(tokens * shape_.query_heads * shape_.head_dim), 0);
    LayerKv now = kv();
    now.window_queries = View<const float, 4>::dense(queries_.data(), {1, shape_.query_heads, tokens, shape_.head_dim});
    scorer_->observe(now, Stream::cpu());
  }
  // Appends a token, whose query attends like this: [query head][token].
  void step(const std::vector<float>& attention) {
    append(1);
    attention_ = attention;
    scorer_->observe(kv(), Stream::cpu());
    ++steps_;
  }
  // As core asks for them after the last step.
  std::vector<float> scores() {
    const LayerKv now = kv();
    Guarded<3> out({1, 1, now.max_length});
    scorer_->score(now, out.view(), Stream::cpu());
    return out.values();
  }
  // The tokens that stay, of so many.
  std::vector<int> kept(int budget) {
    const std::vector<float> all = scores();
    std::vector<double> pinned(all.begin(), all.end());
    const Pins pins = scorer_->pins(budget);
    for (int t = 0; t < tokens_; ++t)
      if (t < pins.first || t >= tokens_ - pins.last) pinned[static_cast<std::size_t>(t)] = INFINITY;
    return best(pinned, positions_to(tokens_), static_cast<std::size_t>(budget));
  }

 private:
  void append(int tokens) {
    for (; tokens > 0; --tokens, ++tokens_) cache_->append(0, 0, std::vector<float>(8), std::vector<float>(8));
  }
  LayerKv kv() {
    pages_ = cache_->view();
    LayerKv now;
    now.shape = &shape_, now.pages = pages_;
    now.keys = {&pages_, KvSide::key}, now.values = {&pages_, KvSide::value};
    now.state_names = &names_, now.workspace = &workspace_;
    now.position = &tokens_, now.steps = now.step = &steps_, now.budget = &budget_;
    now.max_length = tokens_;
    if (!attention_.empty())
      now.mass = View<const float, 3>::dense(attention_.data(), {1, shape_.query_heads, tokens_});
    return now;
  }

  Instance<Scorer> scorer_;
  std::vector<std::string> names_;
  std::unique_ptr<PagedFixture> cache_;
  PagedKv pages_;
  Shape shape_;
  HeapWorkspace workspace_;
  std::vector<float> queries_, attention_;
  std::int32_t tokens_ = 0, steps_ = 0, budget_ = 0;
};

}  // namespace kvlab::test
