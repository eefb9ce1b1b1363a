// Codecs with one f16 scale and zero for each key and each value vector, after RoPE: the quantizers of QServe (int4),
// LeanKV (kAvB: A bits of a key's number, B of a value's) and an FP8 format. int8 is a plugin of its own.
#include <kvlab/plugin.hpp>

namespace {

using kvlab::CodecSide;

constexpr CodecSide plain, two{2}, four{4}, eight{8}, e4m3{8, kvlab::CodeKind::e4m3};

template <CodecSide keys, CodecSide values>
class TokenCodes final : public kvlab::Codec {
 public:
  explicit TokenCodes(const kvlab::Params& p) {
    if (keys.bits && p.get<bool>("keys")) spec_.k = keys;
    if (values.bits && p.get<bool>("values")) spec_.v = values;
  }
  kvlab::CodecSpec spec() const override { return spec_; }

 private:
  kvlab::CodecSpec spec_;
};

template <CodecSide keys, CodecSide values>
constexpr kvlab::Registration codes(const char* name, const char* help) {
  auto made = kvlab::codec<TokenCodes<keys, values>>(name, help);
  if (keys.bits) made.component("keys", "quantize the keys");
  if (values.bits) made.component("values", "quantize the values");
  return made;
}

}  // namespace

KVLAB_PLUGIN((codes<four, four>("int4", "4 bits per element, per token, asymmetric")),
             (codes<e4m3, e4m3>("fp8", "FP8 (e4m3) with a scale per token")),
             (codes<eight, eight>("k8v8", "keys in 8 bits, values in 8")),
             (codes<eight, four>("k8v4", "keys in 8 bits, values in 4 (LeanKV's high precision)")),
             (codes<four, four>("k4v4", "keys in 4 bits, values in 4")),
             (codes<four, two>("k4v2", "keys in 4 bits, values in 2 (LeanKV's low precision)")),
             (codes<four, eight>("k4v8", "keys in 4 bits, values in 8")),
             (codes<two, four>("k2v4", "keys in 2 bits, values in 4")),
             (codes<plain, eight>("k16v8", "keys in the run's dtype, values in 8 bits")))
