// KVQuant: a prompt's keys before RoPE, by channel, and its values, by token, become entries of codebooks that a
// profile has. The largest and smallest numbers stay exact. Hooper et al., NeurIPS 2024.
#include <kvlab/codebooks.hpp>
#include <kvlab/plugin.hpp>

#include <cmath>

namespace {

using kvlab::KvSide;

// The entries of a layer in a profile's codebook: of 2 bits after Q-Norm, then of 2, 3 and 4 bits.
constexpr std::int64_t entries_of_layer = 32;

class KvQuant final : public kvlab::Policy {
 public:
  explicit KvQuant(const kvlab::Params& p)
      : bits_(p.get<int>("bits")),
        share_(p.get<bool>("outliers") ? p.get<double>("outlier_share") : 0),
        dense_(p.get<int>("dense_tokens")),
        q_norm_(p.get<bool>("q_norm") && bits_ == 2),
        outliers_(p.get<bool>("outliers")),
        nonuniform_(p.get<bool>("nonuniform")),
        generated_(p.get<bool>("generated")),
        calibrated_(p.get<bool>("calibration")) {
    if (share_ >= 1)
      throw kvlab::Error(kvlab::Errc::config, "got outlier_share 1, wanted less: nothing would be coded");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.profile(calibrated_).own_amount(true).functional(true).capturable(!generated_);
  }

  void load_profile(const kvlab::Profile& profile) override {
    const std::string which = outliers_ ? "" : "_all";
    lower_ = profile.at("key_lower" + which).values, upper_ = profile.at("key_upper" + which).values;
    books_[0] = profile.at("key_codebook" + which).values, books_[1] = profile.at("value_codebook" + which).values;
    const float share = profile.at("outlier_share").values.at(0);
    if (outliers_ && share != static_cast<float>(share_))
      refuse("got a profile of outlier_share " + std::to_string(share) + ", wanted that of the policy, " +
             std::to_string(share_));
    for (std::size_t i = 0; i < std::min(lower_.size(), upper_.size()); ++i)
      if (!(lower_[i] <= upper_[i]) || std::isinf(lower_[i]) || std::isinf(upper_[i]))
        refuse("got thresholds from " + std::to_string(lower_[i]) + " to " + std::to_string(upper_[i]) +
               " of a key channel, wanted finite ones in order");
    for (const auto& book : books_)
      for (const float x : book)
        if (!std::isfinite(x)) refuse("got an entry " + std::to_string(x) + " of a codebook, wanted finite ones");
  }

  void attach(const kvlab::Shape& s, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    const auto layers = static_cast<std::size_t>(s.layers),
               channels = layers * static_cast<std::size_t>(s.kv_heads) * static_cast<std::size_t>(s.head_dim);
    if (calibrated_)
      for (const auto& [got, wanted] : {std::pair{lower_.size(), channels},
                                        {upper_.size(), channels},
                                        {books_[0].size(), layers * static_cast<std::size_t>(entries_of_layer)},
                                        {books_[1].size(), layers * static_cast<std::size_t>(entries_of_layer)}})
        if (got != wanted)
          refuse("got an array of " + std::to_string(got) + " numbers, wanted " + std::to_string(wanted) +
                 ": those of kvquant_codebooks for this model");
    done_ = kvlab::KeptOfHeads<std::int32_t>("tokens of codebooks", s, w);
    const auto constant = [&](const char* tag, const std::vector<float>& x) {
      return x.empty() ? nullptr : static_cast<const float*>(w.constant(tag, x.data(), x.size() * sizeof(float)));
    };
    const std::int64_t entries = std::int64_t{1} << bits_;
    std::vector<float> uniform;
    for (std::int64_t i = 0; i < entries; ++i)
      uniform.push_back(static_cast<float>(2. * static_cast<double>(i) / static_cast<double>(entries - 1) - 1));
    const float* levels = constant("uniform levels", uniform);
    const float *lower = constant("lower thresholds", lower_), *upper = constant("upper thresholds", upper_);
    const float* books[] = {constant("key codebooks", books_[0]), constant("value codebooks", books_[1])};
    const bool fitted = calibrated_ && nonuniform_;
    layers_.assign(layers, {});
    for (std::int64_t l = 0; l < s.layers; ++l) {
      Layer& layer = layers_[static_cast<std::size_t>(l)];
      const std::int64_t first = l * s.kv_heads * s.head_dim;
      const auto of_channels = [&](const float* x) {
        return kvlab::View<const float, 2>::dense(x ? x + first : nullptr, {s.kv_heads, s.head_dim});
      };
      layer.lower = of_channels(lower), layer.upper = of_channels(upper);
      // The entries of b bits begin at 2^b, those after Q-Norm at 0.
      for (const int side : {0, 1}) {
        const auto entry = [&](std::int64_t i) {
          const float* x = fitted ? books[side] + l * entries_of_layer + i : levels;
          return kvlab::View<const float, 1>::dense(x, {entries});
        };
        layer.books[side] = {entry(entries), entry(q_norm_ ? 0 : entries)};
      }
    }
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (kv.last[0]) code(kv, edits, s);
  }
  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (generated_) code(step, edits, s);
  }

 private:
  struct Layer {
    kvlab::View<const float, 2> lower, upper;  // [kv_head, head_dim]
    kvlab::Codebook books[2];                  // of keys and of values
  };

  // Of each row the tokens that came since the last call.
  void code(const kvlab::LayerKv& kv, kvlab::Edits& edits, kvlab::Stream s) {
    using kvlab::ops::RopeTurn;
    const Layer& layer = layers_[static_cast<std::size_t>(kv.layer)];
    const auto rows = [&](const char* tag) {
      return kv.scratch<float>(tag, {kv.rows(), kv.kv_heads(), kv.max_length, kv.pages.head_dim});
    };
    const auto keys = rows("keys"), values = rows("values");
    const auto of_row = [](auto all, std::int64_t row) {
      all.data += row * all.stride[0], all.extent[0] = 1;
      return all;
    };
    kvlab::PagedKv one = kv.pages;
    one.rows = 1;
    for (std::int64_t row = 0; row < kv.rows(); ++row, ++one.slots) {
      const auto key = of_row(keys, row), value = of_row(values, row);
      const auto done = of_row(done_.of(kv), kv.slots[row]);
      kvlab::Coding how{layer.books[0], outliers_, {done, dense_}};
      kvlab::ops::read_rows({&one, KvSide::key}, key, s);
      kvlab::ops::turn_rows(one, RopeTurn::off, key, s, how.range);
      if (calibrated_)
        kvlab::ops::code_channels(one, layer.lower, layer.upper, how, key, s);
      else
        kvlab::ops::code_tokens(one, share_, how, key, s);
      kvlab::ops::turn_rows(one, RopeTurn::on, key, s, how.range);
      how.book = layer.books[1];
      kvlab::ops::read_rows({&one, KvSide::value}, value, s);
      kvlab::ops::code_tokens(one, share_, how, value, s);
      kvlab::ops::lengths(one, done, s);
    }
    edits.rewrite(KvSide::key, keys);
    edits.rewrite(KvSide::value, values);
  }

  [[noreturn]] static void refuse(const std::string& what) { throw kvlab::Error(kvlab::Errc::data, what); }

  int bits_;
  double share_;
  int dense_;
  bool q_norm_, outliers_, nonuniform_, generated_, calibrated_;
  std::vector<float> lower_, upper_, books_[2];  // of the profile
  std::vector<Layer> layers_;
  kvlab::KeptOfHeads<std::int32_t> done_;  // tokens that are coded, or stay for good
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<KvQuant>("kvquant",
                           "a prompt's keys before RoPE and its values become entries of calibrated codebooks, "
                           "but for outliers (Hooper et al. 2024). Functional: it saves no bytes")
        .param("bits", 3, 2, 4, "of an entry's number")
        .param("outlier_share", 0.01, 0, 1,
               "share of a channel's keys, and of a token's values, that stay "
               "exact, below 1; that of the profile")
        .param("dense_tokens", 0, 0, kvlab::any, "first tokens that stay as they are")
        .param("q_norm", true, "of 2 bits: rounded numbers have the mean and the spread of the calibration")
        .param("generated", false,
               "tokens of decode steps are coded too, behind their step's attention, as in the paper; each step then "
               "reads and writes the whole cache")
        .component("outliers", "some numbers stay exact; off = thresholds are the least and greatest number")
        .component("nonuniform", "entries fitted to the model; off = uniform ones")
        .component("calibration",
                   "thresholds and entries come from a profile; off = keys share thresholds by "
                   "token, as values do, and entries are uniform"))
