// The calibration of KVQuant: thresholds of every key channel before RoPE, and codebooks of each layer's keys and
// values. Hooper et al. 2024, section 3. Its k-means weighs numbers by Fisher information: squared gradients, which
// nothing here computes. A file may have them.
#include <kvlab/plugin.hpp>
#include <kvlab/rewrite.hpp>
#include <kvlab/statistics.hpp>

#include <cmath>
#include <limits>
#include <string>

#include "codebooks.hpp"
#include "weights.hpp"

namespace {

using kvlab::ProfileArray;

struct Thresholds {
  double lower, upper;

  // Adds the numbers between them, normalised to -1 to 1, and their weights. weigh(i): of the i-th number.
  template <class Weigh>
  void add(const std::vector<float>& x, const Weigh& weigh, std::vector<float>& to, std::vector<float>& weights) const {
    const double zero = (upper + lower) / 2, range = (upper - lower) / 2;
    for (std::size_t i = 0; i < x.size(); ++i)
      if (range > 0 && double{x[i]} >= lower && double{x[i]} <= upper) {
        to.push_back(static_cast<float>((double{x[i]} - zero) / range));
        weights.push_back(weigh(i));
      }
  }
};

class KvquantCodebooks final : public kvlab::Profiler {
 public:
  explicit KvquantCodebooks(const kvlab::Params& p)
      : share_(p.get<double>("outlier_share")), rounds_(p.get<int>("rounds")), file_(p.get<std::string>("fisher")) {
    if (share_ >= 1) throw kvlab::Error(kvlab::Errc::config, "got outlier_share 1, wanted less: all would be outliers");
  }

  kvlab::Needs needs() const override { return {}; }
  bool by_pages() const override { return false; }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape;
    width_ = static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(shape.head_dim);
    keys_.assign(static_cast<std::size_t>(shape.layers), {}), values_ = keys_;
    seen_.resize(shape.max_slots, shape.layers, 1);
    if (file_.empty()) return;
    weights_ = kvquant::Weights::read(file_);
    const auto& e = weights_.extent;
    if (e.size() < 3 || e.size() > 4 || e[0] != shape.layers || e[1] != 2 ||
        e.back() != static_cast<std::int64_t>(width_))
      refuse_weights("[" + std::to_string(shape.layers) + ", 2, " + std::to_string(width_) +
                     "] or the same with tokens before the last: layers, keys and values, channels of all KV heads");
  }

  // Tokens of decode steps do not count.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Stream s) override {
    if (!kv.last[0]) return;
    const int n = kv.pages.tokens(0, 0);
    int& seen = seen_.at(kv.slots[0], kv.layer, 0);
    std::vector<float> data(width_ * static_cast<std::size_t>(n));
    const auto rows = kvlab::View<float, 4>::dense(data.data(), {1, shape_.kv_heads, n, shape_.head_dim});
    for (const bool key : {true, false}) {
      kvlab::ops::read_rows(key ? kv.keys : kv.values, rows, s);
      if (key) kvlab::ops::turn_rows(kv.pages, kvlab::ops::RopeTurn::off, rows, s);
      std::vector<float>& to = (key ? keys_ : values_)[static_cast<std::size_t>(kv.layer)];
      for (int t = seen; t < n; ++t)
        for (int h = 0; h < shape_.kv_heads; ++h)
          for (int d = 0; d < shape_.head_dim; ++d) {
            const float x = rows(0, h, t, d);
            if (!std::isfinite(x))
              throw kvlab::Error(kvlab::Errc::data, "got " + std::to_string(x) + " in a " + (key ? "key" : "value") +
                                                        " of layer " + std::to_string(kv.layer) +
                                                        ", wanted finite numbers");
            to.push_back(x);
          }
    }
    seen = n;
  }
  void release(int slot) override { seen_.clear(slot); }

  void finish(kvlab::Profile& out) override {
    const std::size_t layers = keys_.size();
    if (const std::size_t tokens = keys_.empty() ? 0 : keys_[0].size() / width_;
        weights_.of_tokens() && weights_.extent[2] != static_cast<std::int64_t>(tokens))
      refuse_weights(std::to_string(tokens) + " tokens, those of the prompts");
    const auto weight = [&](std::size_t layer, int side, std::size_t token, std::size_t channel) {
      return file_.empty() ? 1.f : weights_.at(layer, side, token, channel);
    };
    for (const bool all : {false, true}) {
      const double share = all ? 0 : share_;
      const std::string which = all ? "_all" : "";
      std::vector<float> lower, upper, of_keys, of_values;
      for (std::size_t l = 0; l < layers; ++l) {
        std::vector<float> numbers, weights;
        for (std::size_t c = 0; c < width_; ++c) {
          std::vector<float> channel;
          for (std::size_t i = c; i < keys_[l].size(); i += width_) channel.push_back(keys_[l][i]);
          const Thresholds t = thresholds(channel, share);
          lower.push_back(static_cast<float>(t.lower)), upper.push_back(static_cast<float>(t.upper));
          t.add(
              channel, [&](std::size_t token) { return weight(l, 0, token, c); }, numbers, weights);
        }
        append(std::move(numbers), weights, of_keys);
        numbers.clear(), weights.clear();
        for (std::size_t i = 0; i < values_[l].size(); i += width_) {
          const auto first = values_[l].begin() + static_cast<std::ptrdiff_t>(i);
          const std::vector<float> token(first, first + static_cast<std::ptrdiff_t>(width_));
          const auto of_channel = [&](std::size_t c) { return weight(l, 1, i / width_, c); };
          thresholds(token, share).add(token, of_channel, numbers, weights);
        }
        append(std::move(numbers), weights, of_values);
      }
      out["key_lower" + which] =
          of_channels(std::move(lower), all ? "least number of a key" : "lower threshold of a key");
      out["key_upper" + which] =
          of_channels(std::move(upper), all ? "greatest number of a key" : "upper threshold of a key");
      for (auto& [name, entries] : {std::pair{"key_codebook", &of_keys}, {"value_codebook", &of_values}})
        out[name + which] = {{static_cast<std::int64_t>(entries->size())},
                             std::move(*entries),
                             "32 entries a layer: of 2 bits after Q-Norm, then of 2, 3 and 4 bits"};
    }
    out["weighted"] = {
        {1}, {file_.empty() ? 0.f : 1.f}, "1 = a file has weighed the numbers of k-means, 0 = nothing has"};
    out["outlier_share"] = {{1}, {static_cast<float>(share_)}, "share of the numbers outside the thresholds"};
  }

 private:
  static Thresholds thresholds(std::vector<float> x, double share) {
    if (x.empty()) return {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::quiet_NaN()};
    std::sort(x.begin(), x.end());
    return {kvquant::quantile(x, share / 2), kvquant::quantile(x, 1 - share / 2)};
  }

  [[noreturn]] void refuse_weights(const std::string& wanted) const {
    std::string got;
    for (const std::int64_t n : weights_.extent) got += (got.empty() ? "" : ", ") + std::to_string(n);
    throw kvlab::Error(kvlab::Errc::data, "got weights [" + got + "], wanted " + wanted, file_);
  }

  void append(std::vector<float> numbers, const std::vector<float>& weights, std::vector<float>& to) const {
    const kvquant::Fit fit(std::move(numbers), file_.empty() ? std::vector<float>() : weights);
    const auto put = [&](const std::vector<double>& c) { to.insert(to.end(), c.begin(), c.end()); };
    put(fit.normed(fit.centres(4, rounds_)));
    for (const std::size_t k : {4u, 8u, 16u}) put(fit.centres(k, rounds_));
  }

  ProfileArray of_channels(std::vector<float> values, const std::string& unit) const {
    return {{shape_.layers, shape_.kv_heads, shape_.head_dim}, std::move(values), unit + " channel before RoPE"};
  }

  double share_;
  int rounds_;
  std::string file_;
  kvquant::Weights weights_;
  kvlab::Shape shape_;
  std::size_t width_ = 0;                          // numbers of a token: of all KV heads
  std::vector<std::vector<float>> keys_, values_;  // [layer] of all prompts, token by token
  kvlab::PerSequence<int> seen_;                   // tokens of a sequence's layer that are among them
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<KvquantCodebooks>("kvquant_codebooks",
                                               "thresholds of key channels before RoPE, and codebooks of each layer")
                 .param("outlier_share", 0.01, 0, 1,
                        "share of a channel's keys, and of a token's values, that no "
                        "codebook stores, below 1")
                 .param("rounds", 50, 1, 10000, "most rounds of k-means")
                 .param("fisher", std::string(),
                        "NumPy file of float32 that weighs the numbers of k-means, as Fisher information does: "
                        "[layer, keys and values, token, channel of all KV heads], or without tokens; '' = 1 each"))
