// Where the tokens of an answer look: attention by decode step and text position. FreeKV, figure 3b.
#include <kvlab/plugin.hpp>
#include <kvlab/statistics.hpp>

#include <algorithm>
#include <string>

namespace {

class AttentionMap final : public kvlab::Profiler {
 public:
  explicit AttentionMap(const kvlab::Params& p)
      : every_(p.get<int>("every")), rows_(p.get<int>("rows")), columns_(p.get<int>("columns")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.mass(kvlab::Mass::decode); }
  bool by_pages() const override { return false; }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape;
    map_.resize({shape.layers, shape.kv_heads, rows_, columns_});
  }

  void observe(const kvlab::LayerStep& step, kvlab::Stream) override {
    for (int row = 0; row < step.rows(); ++row) {
      const int at = step.step[row] / every_;
      if (at >= rows_) continue;
      for (int head = 0; head < step.kv_heads(); ++head) {
        const int tokens = step.pages.tokens(row, head);
        for (int column = 0; column < columns_ && column * every_ < tokens; ++column)
          map_.add({step.layer, head, at, column}, mass(step, row, head, column * every_, tokens));
      }
    }
  }

  void finish(kvlab::Profile& out) override {
    const std::string by = std::to_string(every_);
    out["attention_map"] =
        map_.array("share of a step's attention, mean of the group, by " + by + " steps and " + by + " tokens");
  }

 private:
  double mass(const kvlab::LayerStep& step, int row, int head, int begin, int tokens) const {
    double sum = 0;
    for (int q = head * shape_.group(); q < (head + 1) * shape_.group(); ++q)
      for (int t = begin; t < std::min(begin + every_, tokens); ++t) sum += double{step.mass(row, q, t)};
    return sum / shape_.group();
  }

  int every_, rows_, columns_;
  kvlab::Shape shape_;
  kvlab::Means<4> map_;  // [layer, KV head, steps, tokens]
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<AttentionMap>("attention_map", "attention of decode steps by text position")
                 .param("every", 16, 1, kvlab::any, "decode steps of a row, and tokens of a column")
                 .param("rows", 64, 1, 1024, "rows; later steps do not count")
                 .param("columns", 128, 1, 1024, "columns; later tokens do not count"))
