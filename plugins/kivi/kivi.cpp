// KIVI: keys share scales by channel, because outliers of keys lie in a few channels. Values share them by token. The
// newest tokens stay exact. Liu et al. 2024. kivi2 and kivi4 follow the paper's rule for the newest tokens: a
// sequence's keys become codes by `residual` at once, and its values one by one. Pages have one codec for keys and
// values here, so these two are functional. kivi2_pages and kivi4_pages store codes: pages become codes when they are
// full and `residual` newer tokens follow.
#include <kvlab/plugin.hpp>
#include <kvlab/row_codec.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

namespace {

using kvlab::CodeAxis;
using kvlab::CodeKind;
using kvlab::KvSide;

template <int bits>
class Kivi final : public kvlab::RowCodec {
 public:
  explicit Kivi(const kvlab::Params& p)
      : residual_(p.get<int>("residual")),
        group_(p.get<int>("group")),
        keys_(p.get<bool>("keys")),
        values_(p.get<bool>("values")),
        channels_(p.get<bool>("channels")) {
    if (channels_ && residual_ % tokens_of_group() != 0)
      refuse("got groups of " + std::to_string(group_) + " tokens with residual " + std::to_string(residual_) +
             ", wanted a residual that they divide");
  }
  int residual() const override { return residual_; }

  void attach(const kvlab::Shape& s) override {
    if (s.head_dim % std::min(group_, s.head_dim) != 0)
      refuse("got groups of " + std::to_string(group_) + ", wanted a number that divides the head dimension " +
             std::to_string(s.head_dim));
  }

  int coded(KvSide side, int tokens) const override {
    if (side == KvSide::key) return keys_ ? tokens - tokens % residual_ : 0;
    return values_ ? std::max(tokens - residual_, 0) : 0;
  }

  // Of each group: f16 scale and minimum, then its codes, the first one in the lowest bits.
  std::vector<std::byte> encode(KvSide side, kvlab::View<const float, 2> rows) const override {
    std::vector<std::byte> out;
    each_group(side, rows.extent[0], rows.extent[1], [&](std::int64_t first, std::int64_t stride, int count) {
      const float* x = rows.data + first;
      float least = std::numeric_limits<float>::infinity(), most = -least;  // NaN is neither
      for (int i = 0; i < count; ++i) least = std::fmin(least, x[i * stride]), most = std::fmax(most, x[i * stride]);
      const std::uint16_t meta[] = {kvlab::to_half(least < most ? within((most - least) / most_code) : 0),
                                    kvlab::to_half(least <= most ? within(least) + 0.f : 0)};  // never -0
      const float scale = kvlab::from_half(meta[0]), zero = kvlab::from_half(meta[1]);
      const auto* bytes = reinterpret_cast<const std::byte*>(meta);
      out.insert(out.end(), bytes, bytes + sizeof meta);
      for (int i = 0; i < count; ++i) {
        const float y = scale > 0 ? std::nearbyint((x[i * stride] - zero) / scale) : 0;
        const auto code = static_cast<unsigned>(y > 0 ? std::min(y, most_code) : 0);
        const int shift = i * bits % 8;
        if (shift == 0) out.emplace_back();
        out.back() |= static_cast<std::byte>(code << shift);
      }
    });
    return out;
  }

  void decode(KvSide side, const std::vector<std::byte>& codes, kvlab::View<float, 2> rows) const override {
    const std::byte* from = codes.data();
    each_group(side, rows.extent[0], rows.extent[1], [&](std::int64_t first, std::int64_t stride, int count) {
      std::uint16_t meta[2];
      std::memcpy(meta, from, sizeof meta);
      from += sizeof meta;
      const float scale = kvlab::from_half(meta[0]), zero = kvlab::from_half(meta[1]);
      for (int i = 0; i < count; ++i) {
        const auto code = static_cast<unsigned>(from[i * bits / 8]) >> i * bits % 8 & ((1u << bits) - 1);
        rows.data[first + i * stride] = static_cast<float>(code) * scale + zero;
      }
      from += (count * bits + 7) / 8;
    });
  }

 private:
  static constexpr float most_code = (1 << bits) - 1;

  [[noreturn]] static void refuse(const std::string& what) { throw kvlab::Error(kvlab::Errc::config, what); }
  static float within(float x) { return std::clamp(x, -65504.f, 65504.f); }
  int tokens_of_group() const { return std::min(group_, residual_); }

  // Calls with(first element, elements from one number to the next, numbers) for each group of rows [tokens, dim].
  template <class With>
  void each_group(KvSide side, std::int64_t tokens, std::int64_t dim, const With& with) const {
    const bool by_channel = side == KvSide::key && channels_;
    const std::int64_t group = by_channel ? tokens_of_group() : std::min<std::int64_t>(group_, dim);
    if (by_channel)
      for (std::int64_t t = 0; t < tokens; t += group)
        for (std::int64_t d = 0; d < dim; ++d) with(t * dim + d, dim, static_cast<int>(group));
    else
      for (std::int64_t at = 0; at < tokens * dim; at += group) with(at, std::int64_t{1}, static_cast<int>(group));
  }

  int residual_, group_;
  bool keys_, values_, channels_;
};

template <int bits>
class KiviPages final : public kvlab::Codec {
 public:
  explicit KiviPages(const kvlab::Params& p) : residual_(p.get<int>("residual")) {
    const auto group = static_cast<std::uint16_t>(p.get<int>("group"));
    const CodeAxis axis = p.get<bool>("channels") ? CodeAxis::channel : CodeAxis::token;
    if (p.get<bool>("keys")) spec_.k = {bits, CodeKind::integer, axis, group};
    if (p.get<bool>("values")) spec_.v = {bits, CodeKind::integer, CodeAxis::token, group};
  }
  kvlab::CodecSpec spec() const override { return spec_; }
  int residual() const override { return residual_; }

 private:
  int residual_;
  kvlab::CodecSpec spec_;
};

template <class Made>
constexpr kvlab::Registration kivi(const char* name, const char* help, int least_group, int least_residual,
                                   const char* residual) {
  return kvlab::codec<Made>(name, help)
      .param("group", 32, least_group, 256,
             "numbers that share a scale: tokens of a key's channel, channels of a value")
      .param("residual", 128, least_residual, kvlab::any, residual)
      .component("keys", "quantize the keys")
      .component("values", "quantize the values")
      .component("channels", "off = keys share scales by token, as values do");
}

constexpr const char* exact = "newest values that stay exact, and keys that become codes at once";
constexpr const char* at_least = "newest tokens that stay exact, at least";

}  // namespace

KVLAB_PLUGIN((kivi<Kivi<2>>("kivi2",
                            "2 bits, keys by channel and values by token, with the paper's exact tokens (KIVI, Liu et "
                            "al. 2024). Functional: it saves no bytes",
                            4, 1, exact)),
             (kivi<Kivi<4>>("kivi4",
                            "4 bits, keys by channel and values by token, with the paper's exact tokens (KIVI, Liu et "
                            "al. 2024). Functional: it saves no bytes",
                            4, 1, exact)),
             (kivi<KiviPages<2>>("kivi2_pages",
                                 "the numbers of kivi2 in stored codes, with more exact tokens: whole pages age, keys "
                                 "and values together",
                                 8, 0, at_least)),
             (kivi<KiviPages<4>>("kivi4_pages",
                                 "the numbers of kivi4 in stored codes, with more exact tokens: whole pages age, keys "
                                 "and values together",
                                 8, 0, at_least)))
