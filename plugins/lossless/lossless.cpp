// Full pages cross to the host and back packed, bit for bit. Exponents of bf16 take about 3 bits in place of 8.
#include <kvlab/plugin.hpp>

namespace {

class Lossless final : public kvlab::Codec {
 public:
  explicit Lossless(const kvlab::Params&) {}
  kvlab::CodecSpec spec() const override {
    kvlab::CodecSpec c;
    c.packs = true;
    return c;
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::codec<Lossless>("lossless", "pages on the host in bf16, packed on their way (placement.codec)"))
