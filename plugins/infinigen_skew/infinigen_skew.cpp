// The skewing matrices of InfiniGen: of each KV head the directions along which a sample's queries are longest. Lee et
// al., OSDI 2024, section 4.2.
#include <kvlab/eigen.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/profiler.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

class InfiniGenSkew final : public kvlab::Profiler {
 public:
  explicit InfiniGenSkew(const kvlab::Params& p)
      : queries_(p.get<int>("queries")), ratio_(p.get<double>("partial_ratio")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.window_queries(queries_); }
  bool by_pages() const override { return false; }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape, dim_ = static_cast<std::size_t>(shape.head_dim);
    products_.assign(static_cast<std::size_t>(shape.layers * shape.kv_heads), std::vector<double>(dim_ * dim_));
    seen_ = false;
  }

  // A KV head's Q has the queries of its group below each other. Of Q only Q^T Q counts.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Stream) override {
    if (!kv.last[0]) return;
    const kvlab::View<const float, 4> queries = kv.window_queries.f32();
    for (int h = 0; h < shape_.query_heads; ++h)
      for (std::int64_t i = 0; i < queries.extent[2]; ++i) {
        const float* q = &queries(0, h, i, 0);
        double* of = products_[static_cast<std::size_t>(kv.layer * shape_.kv_heads + h / shape_.group())].data();
        for (std::size_t a = 0; a < dim_; ++a) {
          if (!std::isfinite(q[a]))
            throw kvlab::Error(kvlab::Errc::data, "got " + std::to_string(q[a]) + " in a query of layer " +
                                                      std::to_string(kv.layer) + ", wanted finite numbers");
          const double x = q[a];
          for (std::size_t b = 0; b < dim_; ++b) of[a * dim_ + b] += x * double{q[b]};
        }
        seen_ = true;
      }
  }

  // Q's right singular vectors are the eigenvectors of Q^T Q, and its squared singular values the eigenvalues.
  void finish(kvlab::Profile& out) override {
    const float nothing = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> directions, before, after;
    for (const std::vector<double>& product : products_) {
      std::vector<double> squares;
      for (std::size_t d = 0; d < dim_; ++d) squares.push_back(product[d * dim_ + d]);
      const kvlab::Eigen eigen = kvlab::eigen_of_symmetric(product, shape_.head_dim);
      for (const double x : eigen.vectors) directions.push_back(seen_ ? static_cast<float>(x) : nothing);
      before.push_back(share(squares)), after.push_back(share(eigen.values));
    }
    const std::int64_t layers = shape_.layers, heads = shape_.kv_heads, dim = shape_.head_dim;
    const std::string few = "share of the queries' squares that the longest " + std::to_string(few_channels()) + " of ";
    out["skew"] = {{layers, heads, dim, dim}, directions, "element of a direction; the longest direction comes first"};
    out["share_of_elements"] = {{layers, heads}, before, few + "the elements have"};
    out["share_of_directions"] = {{layers, heads}, after, few + "the directions have"};
  }

 private:
  int few_channels() const { return std::max(1, static_cast<int>(ratio_ * shape_.head_dim)); }
  float share(std::vector<double> squares) const {
    std::sort(squares.rbegin(), squares.rend());
    double all = 0, few = 0;
    for (std::size_t i = 0; i < squares.size(); ++i)
      all += squares[i], few += i < static_cast<std::size_t>(few_channels()) ? squares[i] : 0;
    return static_cast<float>(few / all);
  }

  int queries_;
  double ratio_;
  kvlab::Shape shape_;
  std::size_t dim_ = 0;
  bool seen_ = false;
  std::vector<std::vector<double>> products_;  // [layer, KV head] of Q^T Q
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<InfiniGenSkew>("infinigen_skew",
                                            "the directions along which the queries of each KV head are longest")
                 .param("queries", 2048, 1, kvlab::any, "last queries of each prompt that count")
                 .param("partial_ratio", 0.2, 0.001, 1, "share of the channels whose share of the queries is told"))
