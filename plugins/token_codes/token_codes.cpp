// Codecs with one f16 scale and zero for each key and each value vector, after RoPE: the quantizers of QServe (int4),
// Atom, LeanKV (kAvB: A bits of a key's number, B of a value's) and an FP8 format. int8 is a plugin of its own.
#include <kvlab/plugin.hpp>

#include <string>

namespace {

enum class Zero : std::uint8_t { whole, real };

}  // namespace

template <>
struct kvlab::Choices<Zero> {
  static constexpr std::pair<Zero, const char*> all[] = {{Zero::whole, "whole"}, {Zero::real, "real"}};
};

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

class Atom final : public kvlab::Codec {
 public:
  explicit Atom(const kvlab::Params& p) {
    const int bits = p.get<int>("bits");
    if (bits != 2 && bits != 4 && bits != 8)
      throw kvlab::Error(kvlab::Errc::config, "got " + std::to_string(bits) + " bits, wanted 2, 4 or 8");
    const CodecSide side{static_cast<std::uint8_t>(bits),
                         p.get<Zero>("zero") == Zero::whole ? kvlab::CodeKind::whole_zero : kvlab::CodeKind::integer};
    if (p.get<bool>("keys")) spec_.k = side;
    if (p.get<bool>("values")) spec_.v = side;
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
             (kvlab::codec<Atom>("atom", "per token, asymmetric, and one of the codes is zero (Zhao et al. 2024)")
                  .param("bits", 4, 2, 8, "of an element: 2, 4 or 8")
                  .param("zero", Zero::whole,
                         "whole: the zero is rounded to a code, so vectors of one sign saturate; real: it is the least "
                         "element, as in int4")
                  .component("keys", "quantize the keys")
                  .component("values", "quantize the values")),
             (codes<e4m3, e4m3>("fp8", "FP8 (e4m3) with a scale per token")),
             (codes<eight, eight>("k8v8", "keys in 8 bits, values in 8")),
             (codes<eight, four>("k8v4", "keys in 8 bits, values in 4 (LeanKV's high precision)")),
             (codes<four, four>("k4v4", "keys in 4 bits, values in 4")),
             (codes<four, two>("k4v2", "keys in 4 bits, values in 2 (LeanKV's low precision)")),
             (codes<four, eight>("k4v8", "keys in 4 bits, values in 8")),
             (codes<two, four>("k2v4", "keys in 2 bits, values in 4")),
             (codes<plain, eight>("k16v8", "keys in the run's dtype, values in 8 bits")))
