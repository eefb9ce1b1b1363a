// Gates of DuoAttention: the trained ones of a file, or a stand-in that is measured. Xiao et al., ICLR 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/statistics.hpp>

#include <algorithm>

#include "gates.hpp"

namespace {

class DuoAttentionHeads final : public kvlab::Profiler {
 public:
  explicit DuoAttentionHeads(const kvlab::Params& p)
      : file_(p.get<std::string>("gates")), sinks_(p.get<int>("sinks")), window_(p.get<int>("window")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.mass(file_.empty() ? kvlab::Mass::decode : kvlab::Mass::none);
  }
  bool by_pages() const override { return false; }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape;
    beyond_.resize({shape.layers, shape.kv_heads});
    if (!file_.empty()) trained_ = duo_attention::read_gates(file_, shape.layers, shape.kv_heads);
  }

  // The full cache keeps tokens in the text's order.
  void observe(const kvlab::LayerStep& step, kvlab::Stream) override {
    if (!file_.empty()) return;
    for (int row = 0; row < step.rows(); ++row)
      for (int head = 0; head < step.kv_heads(); ++head) {
        double most = 0;
        const int group = shape_.group(), last = step.pages.tokens(row, head) - window_;
        for (int q = head * group; q < (head + 1) * group; ++q) {
          double beyond = 0;
          for (int t = sinks_; t < last; ++t) beyond += step.mass(row, q, t);
          most = std::max(most, beyond);
        }
        if (last > sinks_) beyond_.add({step.layer, head}, most);
      }
  }

  void finish(kvlab::Profile& out) override {
    if (!file_.empty())
      out["gate"] = {{shape_.layers, shape_.kv_heads}, trained_, "trained gate, 0 to 1, of " + file_};
    else
      out["gate"] = beyond_.array("measured in place of a trained gate: share of attention beyond sinks and window");
  }

 private:
  std::string file_;
  int sinks_, window_;
  kvlab::Shape shape_;
  std::vector<float> trained_;
  kvlab::Means<2> beyond_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<DuoAttentionHeads>("duo_attention_heads",
                                                "gates of DuoAttention: trained ones of a file, or a measured stand-in")
                 .param("gates", std::string(),
                        "file of trained gates, from the current folder: a line for each layer, a number for each KV "
                        "head; nothing = measure")
                 .param("sinks", 64, 0, kvlab::any, "first tokens that a streaming head keeps")
                 .param("window", 256, 1, kvlab::any, "newest tokens that a streaming head keeps"))
