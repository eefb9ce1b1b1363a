// A policy of the tree over one layer with one KV head, whose page scores are known.
#pragma once
#include <kvlab/policy.hpp>

#include <catch2/catch.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"
#include "store/cpu_store.hpp"

namespace kvlab::test {

class OneHead {
 public:
  using Vectors = std::vector<std::pair<float, float>>;  // their first two elements; the others are 0

  static constexpr int page = 4, dim = 8;

  // keys: of each page, those of all its tokens. tokens: of the text. budget: tokens.
  OneHead(const std::string& name, const std::map<std::string, ParamValue>& params, int budget, const Vectors& keys,
          int tokens, int group)
      : budget_(budget), tokens_(tokens), group_(group) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::policy, name);
    policy_ = create<Policy>(info, resolve(info, params));
    const Needs needs = policy_->needs();
    StoreOptions o;
    o.shape.layers = o.shape.kv_heads = o.shape.max_slots = 1;
    o.shape.query_heads = group, o.shape.head_dim = dim, o.shape.page_size = page, o.shape.max_tokens = 64;
    o.shape.dtype = DType::f32;
    o.summary = needs.page_summary(), o.summary_bits = needs.summary_bits();
    o.host_pages = needs.host_pages();
    store_.emplace(o);
    policy_->attach(store_->shape(), {BudgetAmount::tokens, static_cast<double>(budget)}, store_->workspace());
    REQUIRE(store_->open() == 0);
    std::vector<float> k;
    for (int t = 0; t < tokens; ++t) add(k, keys[static_cast<std::size_t>(t / page)]);
    REQUIRE(store_->append(0, 0, k.data(), k.data(), tokens, 0) == Fit::ok);
  }

  // The policy's edits. queries: of the group's heads, in a decode step or of the prompt's last token.
  std::vector<Edit> select(const Vectors& queries) {
    auto step = layer<LayerStep>(queries);
    step.queries = View<const float, 3>::dense(queries_.data(), {1, group_, dim});
    step.max_pages = (tokens_ + page - 1) / page;
    Edits edits;
    policy_->select(step, edits, Stream::cpu());
    return edits.all();
  }
  std::vector<Edit> prefill(const Vectors& queries) {
    auto kv = layer<LayerPrefill>(queries);
    kv.chunk_queries = View<const float, 4>::dense(queries_.data(), {1, group_, 1, dim});
    const bool last = true;
    kv.last = &last;
    Edits edits;
    policy_->prefill(kv, edits, Stream::cpu());
    return edits.all();
  }
  void apply(const Edit& edit) { REQUIRE(store_->apply({edit}, rows_).fit == Fit::ok); }

  static std::vector<std::int32_t> pages_of(const Edit& edit) {
    std::vector<std::int32_t> out;
    const std::int64_t at = edit.list.at(0);
    for (int i = 0; i < edit.list.count(at, 0); ++i) out.push_back(edit.list.index(at, 0, i));
    return out;
  }
  std::vector<std::int32_t> on_device() const {
    const PagedKv kv = store_->view(0, rows_);
    std::vector<std::int32_t> out;
    for (int p = 0; p < kv.pages(0, 0); ++p)
      if (kv.entry(0, 0, p).frame != null_frame) out.push_back(p);
    return out;
  }

 private:
  static void add(std::vector<float>& to, const std::pair<float, float>& first) {
    to.insert(to.end(), {first.first, first.second});
    to.resize(to.size() + dim - 2);
  }
  template <class Kv>
  Kv layer(const Vectors& queries) {
    queries_.clear();
    for (const auto& q : queries) add(queries_, q);
    Kv kv;
    kv.shape = &store_->shape();
    kv.pages = store_->view(0, rows_), kv.host_pages = store_->view(0, rows_, Tier::host);
    kv.summaries = store_->summaries(0);
    kv.workspace = &store_->workspace();
    kv.slots = rows_.data();
    kv.position = &tokens_, kv.budget = &budget_, kv.sequence = &sequence_;
    kv.step = kv.steps = &steps_;
    kv.max_length = tokens_;
    return kv;
  }

  const std::vector<std::int32_t> rows_{0};
  const std::int32_t budget_, tokens_, steps_ = 0;
  const std::uint32_t sequence_ = 0;
  const int group_;
  Instance<Policy> policy_;
  std::optional<CpuStore> store_;
  std::vector<float> queries_;
};

}  // namespace kvlab::test
