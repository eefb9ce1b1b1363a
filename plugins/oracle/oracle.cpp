// The oracle of page selection: a step attends to the pages that hold most of its own full attention. No selector keeps
// more of it within the same budget, so the oracle bounds them all. It computes that attention first, which is the work
// that a selector is there to save. Its rows are labelled, and nobody times them.
#include <kvlab/plugin.hpp>

namespace {

class Oracle final : public kvlab::Selector {
 public:
  explicit Oracle(const kvlab::Params& p)
      : group_(p.get<kvlab::GroupRule>("group")),
        dense_(p.get<int>("dense_layers")),
        min_pages_(p.get<int>("min_pages")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.dense_layers(dense_).min_pages(min_pages_).capturable(true).oracle(true);
  }

  // The step's own token is in the cache already, as it is when attention reads it.
  void select(const kvlab::LayerStep& step, kvlab::PageList out, kvlab::Stream s) override {
    const kvlab::Tensor<3>& q = step.queries;
    kvlab::Tensor<4> window;  // of one query
    window.data = q.data;
    window.dtype = q.dtype;
    window.extent = {q.extent[0], q.extent[1], 1, q.extent[2]};
    window.stride = {q.stride[0], q.stride[1], q.stride[2], q.stride[2]};
    const kvlab::Scores mass = step.kv_head_scores("mass");
    kvlab::ops::pooled_votes(window, step.pages, {kvlab::Pooling::none, 1, group_}, mass, *step.workspace, s);
    const auto pages = step.scratch<float>("mass of pages", {step.rows(), step.kv_heads(), step.max_pages});
    kvlab::ops::page_sum(step.pages, mass, pages, s);
    kvlab::ops::top_pages(step.pages, pages, step.page_budgets, {}, out, s);
  }

 private:
  kvlab::GroupRule group_;
  int dense_, min_pages_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::selector<Oracle>("oracle", "reads the pages of largest true attention mass: a bound, never timed")
                 .param("group", kvlab::GroupRule::mean,
                        "how the probabilities of a GQA group become one; mean = most mass in all")
                 .param("dense_layers", 2, 0, kvlab::any, "first layers that attend to everything, as quest's")
                 .param("min_pages", 3, 1, kvlab::any, "least pages per KV head, as quest's"))
