// Rows of codes whose scales belong to groups, in the kernel of decode steps (attend_kernel.cuh), as KIVI stores them:
// keys share a scale by channel, over a page's tokens, and values by token, over 32 channels. A page is a unit of 32
// tokens, or half of one. Its keys, values, scales and zeros come in one bulk copy.
//
// Both scales are neither of a row nor of a column of a tile alone. So codes become f16 numbers before they are
// multiplied: a code by one logical operation in the low bits of a power of two, which a subtraction takes away, then
// code * scale + zero. A channel's scale and zero serve four tokens of a lane, a value's sixteen channels. Scales and
// zeros are halved, so that no number overflows.
#pragma once
#include "base/lanes.cuh"
#include "ops/attend/attend_codes.cuh"

namespace kvlab::ops::decode {

constexpr int value_group = 32;  // channels

template <int Bits, int Dim, int Page>
struct GroupRows : CodePages<Page, Page * Dim * Bits / 4 + Dim * 4 + Page * Dim / value_group * 4>, Columns<false> {
  using Pages = CodePages<Page, Page * Dim * Bits / 4 + Dim * 4 + Page * Dim / value_group * 4>;
  using C = Codes<Bits>;
  using Pages::halves;
  using Pages::unit;
  static constexpr int dim = Dim, row = Dim * Bits / 8;     // bytes of a key or a value
  static constexpr int token_meta = Dim / value_group * 4;  // bytes of a value's scales and zeros
  static constexpr int values = Page * row, key_meta = 2 * values, value_meta = key_meta + Dim * 4;
  // A lane has a quarter of a key and an eighth of a value, each in one piece.
  static constexpr int key_words = row / 16, value_words = row / 32, own_keys = Dim / 4, own_values = Dim / 8;
  static constexpr int pairs = C::per_word / 2, tiles = Dim / 16;
  static_assert(key_words > 0 && value_words > 0 && key_meta % 1024 == 0 && own_values <= value_group);
  static_assert(Page == 16 || (16 * token_meta) % 128 == 0);

  static __device__ __forceinline__ int token_of(int g) {
    return static_cast<int>(token_order<row, row>() >> 4 * g & 7);
  }
  static constexpr int element_run = 4;  // elements that follow each other
  static __device__ __forceinline__ int element_of(int g, int e) { return g * own_values + e; }
  static __device__ __forceinline__ int query_element(int q, int i) { return q * own_keys + i; }

  unsigned qf[own_keys / 2];  // B fragments of Q^T: columns are the query heads of the group
  float factor;               // of products
  float o[1][tiles][4];
  // Where the lane's tokens of a unit's first half lie, the second one 8 tokens on: keys of tile row g, values and
  // their metadata of tile rows 2q and 2q + 1. channels: metadata of the lane's first channel.
  unsigned key_at[2], value_at[2][2], value_meta_at[2][2], channels;
  int g, q;

  __device__ __forceinline__ GroupRows(const Args& a, const float4 (&asked)[1][Dim / 16], int group, int g, int q)
      : g(g), q(q) {
    float x[own_keys], top = 0;
#pragma unroll
    for (int i = 0; i < own_keys / 4; ++i)
      x[4 * i] = asked[0][i].x, x[4 * i + 1] = asked[0][i].y, x[4 * i + 2] = asked[0][i].z,
            x[4 * i + 3] = asked[0][i].w;
#pragma unroll
    for (int i = 0; i < own_keys; ++i) x[i] *= a.scale, top = fmaxf(top, fabsf(x[i]));
    top = most_of_lanes(top);
    // The group's largest element becomes 16 to 32.
    const int exponent = max(-100, min(100, static_cast<int>(__float_as_uint(top) >> 23) - 127));
    const float scale = __uint_as_float(static_cast<unsigned>(127 - exponent + 4) << 23);
    factor = 2 / scale;
#pragma unroll
    for (int w = 0; w < key_words; ++w)
#pragma unroll
      for (int i = 0; i < pairs; ++i) {
        const int e = w * C::per_word + i;
        const float power = g < group ? scale : 0.f;
        qf[w * pairs + i] = Pair<__half>::pack(x[e] * power, x[e + pairs] * power);
      }
#pragma unroll
    for (int t = 0; t < tiles; ++t) o[0][t][0] = o[0][t][1] = o[0][t][2] = o[0][t][3] = 0;
    for (int r = 0; r < 2; ++r) {
      key_at[r] = Pages::place_of((token_of(g) + 8 * r) * row + q * own_keys * Bits / 8);
      for (int t = 0; t < 2; ++t) {
        const int token = token_of(2 * q + t) + 8 * r;
        value_at[t][r] = Pages::place_of(values + token * row + g * value_words * 4);
        value_meta_at[t][r] = Pages::place_of(value_meta + token * token_meta + g * own_values / value_group * 4);
      }
    }
    channels = Pages::place_of(key_meta + q * own_keys * 4);
  }

  // Scores, times log2(e), of the unit's tokens at tile rows g + 8 r.
  __device__ __forceinline__ void score(unsigned at, float (&scores)[1][4 * halves]) const {
    unsigned k[halves][2][key_words];
#pragma unroll
    for (int u = 0; u < halves; ++u)
#pragma unroll
      for (int r = 0; r < 2; ++r) Pages::load_key(at + Pages::template half_of<row>(key_at[r], u), k[u][r]);
    float c[halves][2][4] = {};  // two sums, so that a product need not wait for the one before
#pragma unroll
    for (int w = 0; w < key_words; ++w) {
      unsigned scale[pairs], zero[pairs];
      if constexpr (Page == 32) load_channels(at, w, scale, zero);
#pragma unroll
      for (int u = 0; u < halves; ++u) {
        if constexpr (Page == 16) load_channels(at + static_cast<unsigned>(u * Pages::page_room), w, scale, zero);
#pragma unroll
        for (int i = 0; i < pairs; i += 2) {
          const int f = w * pairs + i;
          mma16816<__half>(c[u][f / 2 % 2], number(k[u][0][w], i, scale[i], zero[i]),
                           number(k[u][1][w], i, scale[i], zero[i]),
                           number(k[u][0][w], i + 1, scale[i + 1], zero[i + 1]),
                           number(k[u][1][w], i + 1, scale[i + 1], zero[i + 1]), qf[f], qf[f + 1]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < halves; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[0][4 * u + i] = (c[u][0][i] + c[u][1][i]) * factor;
  }

  // Adds the unit's first `valid` tokens. scores: -inf where nothing is seen; on return, the shares 2^(score - high).
  __device__ __forceinline__ void add(unsigned at, int valid, float (&scores)[1][4 * halves], float (&highs)[1][2],
                                      float (&sums)[1][2]) {
    float(&s)[4 * halves] = scores[0], (&high)[2] = highs[0], (&sum)[2] = sums[0];
    unsigned w[halves][4][value_words], scale[halves][2], zero[halves][2];  // of tokens 2q and 2q + 1, and 8 on
#pragma unroll
    for (int u = 0; u < halves; ++u) {
#pragma unroll
      for (int t = 0; t < 4; ++t)
        Pages::template load_words<value_words>(at + Pages::template half_of<row>(value_at[t % 2][t / 2], u), w[u][t]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unsigned meta[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          meta[t] = load_shared4(at + Pages::template half_of<token_meta>(value_meta_at[t][r], u));
          // What lies after the last token may be anything.
          if (valid < unit && 16 * u + token_of(2 * q + t) + 8 * r >= valid) meta[t] = 0;
        }
        halve(meta[0], meta[1], scale[u][r], zero[u][r]);
      }
    }
    float top[2] = {high[0], high[1]};
#pragma unroll
    for (int r = 0; r < 2 * halves; ++r)
      for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], s[2 * r + h]);
    if (__any_sync(~0u, top[0] > high[0] || top[1] > high[1])) {  // both rise rarely
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = most_of_lanes<4, 16>(top[h]);
        const float shrink = high[h] == -INFINITY ? 0.f : exp2_fast(high[h] - top[h]);
        high[h] = top[h];
        sum[h] *= shrink;
#pragma unroll
        for (int t = 0; t < tiles; ++t) o[0][t][h] *= shrink, o[0][t][2 + h] *= shrink;
      }
    }
    const float shift[2] = {high[0] == -INFINITY ? 0.f : high[0], high[1] == -INFINITY ? 0.f : high[1]};
    unsigned p[2 * halves];
#pragma unroll
    for (int r = 0; r < 2 * halves; ++r) {
      const float x = exp2_fast(s[2 * r] - shift[0]), y = exp2_fast(s[2 * r + 1] - shift[1]);
      s[2 * r] = x, s[2 * r + 1] = y;
      sum[0] += x, sum[1] += y;
      p[r] = Pair<__half>::pack(x, y);
    }
#pragma unroll
    for (int r = 0; r < 2 * halves; ++r) p[r] = transpose8x8(p[r]);
#pragma unroll
    for (int u = 0; u < halves; ++u)
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        const int word = 2 * t / C::per_word, i = 2 * t % C::per_word;
        unsigned v[4];
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            v[2 * r + e] =
                number(__byte_perm(w[u][2 * r][word], w[u][2 * r + 1][word], i + e < pairs ? 0x5410 : 0x7632),
                       (i + e) % pairs, scale[u][r], zero[u][r]);
        mma16816<__half>(o[0][t], v[0], v[1], v[2], v[3], p[2 * u], p[2 * u + 1]);
      }
  }

  // o = sums of probabilities times values.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int t = 0; t < tiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[0][t][i] *= 2;
  }

 private:
  // Elements i and i + pairs of a word, as numbers.
  static __device__ __forceinline__ unsigned number(unsigned word, int i, unsigned scale, unsigned zero) {
    const int shift = C::shift_of(i);
    const unsigned mask = ((1u << Bits) - 1u) * 0x10001u << shift,
                   power = (25u - static_cast<unsigned>(shift)) * 0x4000400u;
    return fma_halves(sub_halves(and_or(word >> i * Bits / 8 * 8, mask, power), power), scale, zero);
  }
  // Half the scales and zeros of two groups, from (scale, zero) of each.
  static __device__ __forceinline__ void halve(unsigned low, unsigned high, unsigned& scale, unsigned& zero) {
    constexpr unsigned half = 0x38003800;
    scale = mul_halves(__byte_perm(low, high, 0x5410), half);
    zero = mul_halves(__byte_perm(low, high, 0x7632), half);
  }
  // Those of the channels of word w. at: of the page.
  __device__ __forceinline__ void load_channels(unsigned at, int w, unsigned (&scale)[pairs],
                                                unsigned (&zero)[pairs]) const {
    uint4 meta[C::per_word / 4];
#pragma unroll
    for (int j = 0; j < C::per_word / 4; ++j)
      meta[j] = load_shared16(at + (channels ^ static_cast<unsigned>(w * C::per_word * 4 + j * 16)));
#pragma unroll
    for (int j = 0; j < pairs / 4; ++j) {
      const uint4 low = meta[j], high = meta[j + pairs / 4];
      halve(low.x, high.x, scale[4 * j], zero[4 * j]);
      halve(low.y, high.y, scale[4 * j + 1], zero[4 * j + 1]);
      halve(low.z, high.z, scale[4 * j + 2], zero[4 * j + 2]);
      halve(low.w, high.w, scale[4 * j + 3], zero[4 * j + 3]);
    }
  }
};

}  // namespace kvlab::ops::decode
