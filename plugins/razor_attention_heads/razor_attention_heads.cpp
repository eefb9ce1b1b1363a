// Echo and induction scores of RazorAttention, on random tokens that repeat. Tang et al., ICLR 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/statistics.hpp>

#include <algorithm>

namespace {

constexpr int all_queries = 1 << 20;

class RazorAttentionHeads final : public kvlab::Profiler {
 public:
  explicit RazorAttentionHeads(const kvlab::Params& p) : repeats_(p.get<int>("repeats")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.window_queries(all_queries).chunked_prompts(false); }
  bool by_pages() const override { return false; }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape;
    for (auto* means : {&echo_, &induction_}) means->resize({shape.layers, shape.query_heads});
  }

  // The text's last tokens are the copies. BOS stands in front of them: the remainder of the division.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Stream s) override {
    const int n = kv.position[0], period = n / repeats_, first = n % repeats_;
    if (!kv.last[0] || period == 0) return;
    const kvlab::Scores row = kv.query_head_scores("attention of a query");
    const kvlab::View<const float, 4> all = kv.window_queries.f32();
    for (int i = first + period; i < n; ++i) {
      kvlab::View<const float, 4> query = all;
      query.data += (all.extent[2] - n + i) * all.stride[2], query.extent[2] = 1;
      const std::int32_t seen = i + 1;
      kvlab::ops::window_votes(query, &seen, kv.pages, row, s);
      for (int head = 0; head < shape_.query_heads; ++head) {
        double echo = 0, induction = 0;
        for (int j = i - period; j >= first; j -= period) echo += row(0, head, j), induction += row(0, head, j + 1);
        echo_.add({kv.layer, head}, echo);
        induction_.add({kv.layer, head}, induction);
      }
    }
  }

  void finish(kvlab::Profile& out) override {
    out["echo"] = greatest(echo_, "share of attention at earlier copies of the query's token");
    out["induction"] = greatest(induction_, "share of attention at the tokens behind earlier copies");
  }

 private:
  // A KV head's score is the greatest of its group.
  kvlab::ProfileArray greatest(const kvlab::Means<2>& means, const char* unit) const {
    const std::vector<float> of_query_heads = means.array({}).values;
    kvlab::ProfileArray out{{shape_.layers, shape_.kv_heads}, {}, unit};
    for (auto at = of_query_heads.begin(); at != of_query_heads.end(); at += shape_.group())
      out.values.push_back(*std::max_element(at, at + shape_.group()));
    return out;
  }

  int repeats_;
  kvlab::Shape shape_;
  kvlab::Means<2> echo_, induction_;  // [layer, query head]
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<RazorAttentionHeads>("razor_attention_heads",
                                                  "echo and induction scores of the heads (RazorAttention)")
                 .param("repeats", 4, 2, kvlab::any, "copies that each prompt consists of, as repeated_tokens makes"))
