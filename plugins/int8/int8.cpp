// int8: quantizes each key and value vector of a token on its own, after RoPE, asymmetric, with f16 scale and zero. It
// is the per-token quantizer of QServe and LeanKV at 8 bits.
#include <kvlab/plugin.hpp>

namespace {

class Int8 final : public kvlab::Codec {
 public:
  explicit Int8(const kvlab::Params& p) : keys_(p.get<bool>("keys")), values_(p.get<bool>("values")) {}
  kvlab::CodecSpec spec() const override {
    kvlab::CodecSpec c;
    if (keys_) c.k.bits = 8;
    if (values_) c.v.bits = 8;
    return c;
  }

 private:
  bool keys_, values_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::codec<Int8>("int8", "8 bits per element, per token, asymmetric")
                 .component("keys", "quantize the keys")
                 .component("values", "quantize the values"))
