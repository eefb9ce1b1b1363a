// Codecs with one f16 scale and zero for each key and each value vector, after RoPE: the quantizers of QServe (int4),
// Atom, LeanKV (kAvB: A bits of a key's number, B of a value's) and an FP8 format. int8 is a plugin of its own.
#include <kvlab/plugin.hpp>
#include <kvlab/row_codec.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
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

int bits_of(const kvlab::Params& p) {
  const int bits = p.get<int>("bits");
  if (bits != 2 && bits != 4 && bits != 8)
    throw kvlab::Error(kvlab::Errc::config, "got " + std::to_string(bits) + " bits, wanted 2, 4 or 8");
  return bits;
}

class Atom final : public kvlab::Codec {
 public:
  explicit Atom(const kvlab::Params& p) {
    const int bits = bits_of(p);
    const CodecSide side{static_cast<std::uint8_t>(bits),
                         p.get<Zero>("zero") == Zero::whole ? kvlab::CodeKind::whole_zero : kvlab::CodeKind::integer};
    if (p.get<bool>("keys")) spec_.k = side;
    if (p.get<bool>("values")) spec_.v = side;
  }
  kvlab::CodecSpec spec() const override { return spec_; }

 private:
  kvlab::CodecSpec spec_;
};

// Atom's numbers with its clipping ratio. Kernels that write codes know no ratio, so this is a format of its own.
class AtomClip final : public kvlab::RowCodec {
 public:
  explicit AtomClip(const kvlab::Params& p)
      : most_code_(static_cast<float>((1 << bits_of(p)) - 1)),
        clip_(p.get<float>("clip")),
        keys_(p.get<bool>("keys")),
        values_(p.get<bool>("values")) {}

  int coded(kvlab::KvSide side, int tokens) const override {
    return (side == kvlab::KvSide::key ? keys_ : values_) ? tokens : 0;
  }

  // Of each row: f16 scale and zero, then a byte for each code.
  std::vector<std::byte> encode(kvlab::KvSide, kvlab::View<const float, 2> rows) const override {
    std::vector<std::byte> out;
    for (std::int64_t t = 0; t < rows.extent[0]; ++t) {
      const float *x = &rows(t, 0), *end = x + rows.extent[1];
      float least = std::numeric_limits<float>::infinity(), most = -least;  // NaN is neither
      for (const float* y = x; y < end; ++y) least = std::fmin(least, *y), most = std::fmax(most, *y);
      std::uint16_t meta[2] = {};
      if (least <= most) {
        least *= clip_, most *= clip_;
        const float range = most - least > least_range ? most - least : least_range, scale = within(range / most_code_);
        const float zero = std::nearbyint(code_within(-least / scale));
        meta[0] = kvlab::to_half(scale), meta[1] = kvlab::to_half(within(-scale * zero) + 0.f);  // never -0
      }
      const auto* bytes = reinterpret_cast<const std::byte*>(meta);
      out.insert(out.end(), bytes, bytes + sizeof meta);
      const float scale = kvlab::from_half(meta[0]), zero = kvlab::from_half(meta[1]);
      for (; x < end; ++x) {
        const float code = scale > 0 ? std::nearbyint(code_within((*x - zero) / scale)) : 0;
        out.push_back(static_cast<std::byte>(static_cast<int>(code)));
      }
    }
    return out;
  }

  void decode(kvlab::KvSide, const std::vector<std::byte>& codes, kvlab::View<float, 2> rows) const override {
    const std::byte* from = codes.data();
    for (std::int64_t t = 0; t < rows.extent[0]; ++t) {
      std::uint16_t meta[2];
      std::memcpy(meta, from, sizeof meta);
      from += sizeof meta;
      const float scale = kvlab::from_half(meta[0]), zero = kvlab::from_half(meta[1]);
      for (std::int64_t d = 0; d < rows.extent[1]; ++d)
        rows(t, d) = static_cast<float>(std::to_integer<int>(*from++)) * scale + zero;
    }
  }

 private:
  static constexpr float least_range = 1e-5f;
  static float within(float x) { return std::clamp(x, -65504.f, 65504.f); }
  float code_within(float y) const { return y > 0 ? std::min(y, most_code_) : 0; }  // NaN is 0

  float most_code_, clip_;
  bool keys_, values_;
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
             (kvlab::codec<AtomClip>("atom_clip", "atom with a clipping ratio. Functional: it saves no bytes")
                  .param("bits", 4, 2, 8, "of an element: 2, 4 or 8")
                  .param("clip", 1., 1e-3, 1, "a vector's greatest and least element are multiplied by it; 1 = none")
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
