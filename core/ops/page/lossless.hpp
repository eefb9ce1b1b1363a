// Pages of bf16 in fewer bytes without loss, for a link between tiers. Keys and values of a model have few different
// exponents. The exponent of most numbers therefore goes into 3 bits: its distance to a base of the side.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// A side of n numbers, packed in place of its rows:
//   header      16 bytes: the base and the number of exceptions, 4 bytes each
//   [n]         sign and fraction of a number, as the bits 7 and 0 to 6
//   [n / 8]     the low two bits of eight distances, 2 bytes; the first number has the lowest bits
//   [n / 8]     the high bits of eight distances, 1 byte
//   [exception] exponents of the numbers whose distance is lossless_exception
// It takes a multiple of 16 bytes. A side that would not be smaller stays as it is.
constexpr int lossless_header = 16, lossless_exception = 7, lossless_run = 256;

constexpr std::int32_t lossless_bytes(int n, int exceptions) {
  return (lossless_header + n + n / 8 * 3 + exceptions + 15) / 16 * 16;
}

struct LosslessPages {
  PageLayout layout;  // bf16 without codes; page_size * head_dim is a multiple of lossless_run
  int pages = 0;
  const std::byte* from = nullptr;
  const std::int32_t* from_frames = nullptr;  // [page] frames as in PageEntry, from `from` on
  std::byte* to = nullptr;
  const std::int32_t* to_frames = nullptr;
  std::int32_t* bytes =
      nullptr;  // [page, 2] of a packed page's keys and values; those of their rows: they are as before
};

// Copies frames whose sides it packs. The base is the one with the fewest exceptions; of several the lowest. It writes
// `bytes` and leaves what lies behind a packed side undefined. On a GPU every pointer is memory that kernels reach, so
// `to` may be pinned. Errc::unsupported for another layout. Bytes: the frames, and what the packed ones take.
void lossless_pack(const LosslessPages& a, Stream s);
// Copies such frames back: the same bits as before lossless_pack. It reads `bytes`.
void lossless_unpack(const LosslessPages& a, Stream s);

}  // namespace kvlab::ops
