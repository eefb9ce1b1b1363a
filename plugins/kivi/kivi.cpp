// KIVI: keys share scales by channel, because outliers of keys lie in a few channels. Values share them by token. The
// newest tokens stay exact. Liu et al. 2024. KIVI encodes keys by `residual` tokens at once and values one by one. A
// page has one codec here, so both wait until a page is full and `residual` newer tokens follow.
#include <kvlab/plugin.hpp>

namespace {

using kvlab::CodeAxis;
using kvlab::CodeKind;

template <int bits>
class Kivi final : public kvlab::Codec {
 public:
  explicit Kivi(const kvlab::Params& p) : residual_(p.get<int>("residual")) {
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

template <int bits>
constexpr kvlab::Registration kivi(const char* name, const char* help) {
  return kvlab::codec<Kivi<bits>>(name, help)
      .param("group", 32, 8, 256, "numbers that share a scale: tokens of a key's channel, channels of a value")
      .param("residual", 128, 0, kvlab::any, "newest tokens that stay exact, at least")
      .component("keys", "quantize the keys")
      .component("values", "quantize the values")
      .component("channels", "off = keys share scales by token, as values do");
}

}  // namespace

KVLAB_PLUGIN((kivi<2>("kivi2", "2 bits, keys by channel and values by token (KIVI, Liu et al. 2024)")),
             (kivi<4>("kivi4", "4 bits, keys by channel and values by token (KIVI, Liu et al. 2024)")))
