// A length that the host reads: right on the CPU, a crash on a GPU.
#include <kvlab/plugin.hpp>

namespace {

class HostReader final : public kvlab::Scorer {
 public:
  explicit HostReader(const kvlab::Params&) {}
  int every() const override { return 1; }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::recency(kv.pages, out, s);
    if (kv.pages.tokens(0, 0) > kv.shape->page_size) kvlab::ops::negate(out, s);
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<HostReader>("host_reader", "broken: looks at device memory from the host"))
