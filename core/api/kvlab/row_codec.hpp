// A codec with a format of its own, whatever it is. It encodes and decodes rows by itself, on the CPU.
//
// Core stores the rows that decode() gives back, in the run's dtype. So attention sees what it would see with such a
// format, on either device. Bytes and times are not those of the format, and its cells carry the label `functional`.
// It goes with the full cache and with selectors, whose pages may lie on the host, and with policies of KeepsTokens,
// which see exact rows in the prompt and step that bring them. Beside a selector, pages of tokens that wait for their
// codes stay on the device. No graph holds its steps.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvlab/roles.hpp"

namespace kvlab {

class RowCodec : public Codec {
 public:
  CodecSpec spec() const final { return {}; }

  // Core calls it once, before any sequence. Refuse head dimensions here: Errc::config.
  virtual void attach(const Shape&) {}

  // How many of a sequence's tokens are stored as codes when it holds `tokens`: the first ones of the text. At least 0
  // and at most `tokens`, and no less for more tokens. Core asks for both sides at a prompt's end and after each decode
  // step, behind their attention.
  virtual int coded(KvSide, int tokens) const { return std::max(tokens - residual(), 0); }

  // Codes of the tokens of a KV head that become codes at once: those from coded(before) to coded(now), the oldest
  // first. rows: [token, head_dim] in f32, contiguous, memory of the host. Keys are rotated by RoPE.
  virtual std::vector<std::byte> encode(KvSide, View<const float, 2> rows) const = 0;

  // Writes all elements of these rows, from their codes alone.
  virtual void decode(KvSide, const std::vector<std::byte>& codes, View<float, 2> rows) const = 0;
};

// IEEE half precision. To the nearest, ties to even; 65520 and more become infinity, NaN stays NaN.
std::uint16_t to_half(float x);
float from_half(std::uint16_t bits);

}  // namespace kvlab
