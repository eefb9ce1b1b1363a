// Rows of codes in the kernel of decode steps (attend_kernel.cuh): x = code * scale + zero, with one scale and zero for
// each token's key and value. A unit is a page of 32 tokens or two of 16. A page's keys, values, scales and zeros come
// in one bulk copy. Both halves of a unit are multiplied side by side, so that each hides the other's latencies.
//
// The tensor cores multiply the codes themselves, as f16. A code of B bits becomes f16 by one logical operation: the
// bits of 1024 and of the code times 2^n, where n is the code's place in a byte. So products with queries are
//   sum q (1024 + 2^n code) / 2^n = sum q code + 1024 sum q / 2^n,
// and the second sum is one number of a query. Scales and zeros of keys apply to the scores of a token. Those of values
// go with the token's probability: the scale into it, the zero into a sum of its own.
#pragma once
#include "base/lanes.cuh"
#include "ops/attend/attend_kernel.cuh"

namespace kvlab::ops::decode {

// Codes of Bits bits, element e of a row at bit e * Bits.
template <int Bits>
struct Codes {
  static constexpr int bits = Bits;
  static constexpr bool biased = true;
  static constexpr int per_word = 32 / Bits;
  // The power of two that element e of a word carries.
  static constexpr int shift_of(int e) { return e * Bits % 8; }
  // Elements i and i + per_word / 2 of a word.
  static __device__ __forceinline__ unsigned pair_of(unsigned word, int i) { return unpack(word, i); }
  // Element i of the low half of a word of two tokens. even, odd: their words; i < per_word.
  static __device__ __forceinline__ unsigned tokens_of(unsigned even, unsigned odd, int i) {
    return unpack(__byte_perm(even, odd, i < per_word / 2 ? 0x5410 : 0x7632), i % (per_word / 2));
  }

 private:
  static __device__ __forceinline__ unsigned unpack(unsigned x, int i) {
    const unsigned mask = ((1u << Bits) - 1u) * 0x10001u << shift_of(i);
    return and_or(x >> i * Bits / 8 * 8, mask, 0x64006400u);
  }
};

struct E4m3 {
  static constexpr int bits = 8;
  static constexpr bool biased = false;
  static constexpr int per_word = 4;
  static constexpr int shift_of(int) { return 0; }
  static __device__ __forceinline__ unsigned pair_of(unsigned word, int i) {
    return halves_of_e4m3(__byte_perm(word, 0, i ? 0x4431 : 0x4420));
  }
  static __device__ __forceinline__ unsigned tokens_of(unsigned even, unsigned odd, int i) {
    return halves_of_e4m3(__byte_perm(even, odd, static_cast<unsigned>(i | (4 + i) << 4)));
  }
};

// Token of tile row g, as token_of: no load of keys or values has a bank conflict.
template <int KeyRow, int ValueRow>
constexpr unsigned token_order() {
  constexpr auto both = [](int k, int v) { return KeyRow == k && ValueRow == v; };
  return both(128, 128)  ? 0x36147250u
         : both(128, 64) ? 0x35247160u
         : both(64, 64)  ? 0x65742130u
         : both(64, 32)  ? 0x63724150u
         : both(32, 64)  ? 0x75643120u
         : both(32, 32)  ? 0x67453210u
                         : 0x76543210u;
}

// Units of 32 tokens, of pages that a bulk copy brings as a whole.
template <int Page, int PageBytes>
struct CodePages {
  using Element = EitherHalf;
  static constexpr int column_tiles = 1, unit = 32, halves = unit / unit_tokens, warps = 8;
  static constexpr bool turned = false, listed = false;
  static constexpr int unit_rows = 0;  // no page has several units
  // What is copied of a page, and its room. Swizzled copies begin at multiples of 1024.
  static constexpr int page_bytes = PageBytes, page_room = (page_bytes + 1023) / 1024 * 1024;
  static constexpr int copied_bytes = unit / Page * page_bytes, stage_bytes = unit / Page * page_room;
  static_assert(page_bytes % 128 == 0);

  static __device__ __forceinline__ void copy(const Args&, const CUtensorMap* map, unsigned to, int y0, int y1,
                                              unsigned barrier, std::uint64_t policy) {
    const bool two = Page == 16 && y1 >= 0;
    barrier_expect(barrier, static_cast<unsigned>(two ? 2 * page_bytes : page_bytes));
    bulk_copy_2d(to, map, 0, y0, barrier, policy);
    if (two) bulk_copy_2d(to + page_room, map, 0, y1, barrier, policy);
  }

 protected:
  // The place of the lane's token in half u, from that in the first half. row: bytes from a token to the next one.
  template <int Row>
  static __device__ __forceinline__ unsigned half_of(unsigned first, int u) {
    if (u == 0) return first;
    if constexpr (Page == 16) return first + page_room;
    constexpr unsigned distance = 16 * Row;
    return distance % 1024 == 0 ? first + distance : first ^ swizzled(distance);
  }
  // Words of a key, of which each load has up to four.
  template <int Words>
  static __device__ __forceinline__ void load_key(unsigned from, unsigned (&w)[Words]) {
#pragma unroll
    for (int i = 0; i < Words; i += 4) load_words<(Words < 4 ? Words : 4)>(from ^ static_cast<unsigned>(i * 16), w + i);
  }
  template <int Words>
  static __device__ __forceinline__ void load_words(unsigned from, unsigned* w) {
    if constexpr (Words == 4) {
      const uint4 x = load_shared16(from);
      w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    } else if constexpr (Words == 2) {
      const uint2 x = load_shared8(from);
      w[0] = x.x, w[1] = x.y;
    } else {
      w[0] = load_shared4(from);
    }
  }
  // A place in a stage after the swizzle, kept in a register.
  static __device__ __forceinline__ unsigned place_of(int offset) {
    unsigned x = swizzled(static_cast<unsigned>(offset));
    keep_in_register(x);
    return x;
  }
};

template <class K, class V, int Dim, int Page>
struct CodeRows : CodePages<Page, Page*(Dim*(K::bits + V::bits) / 8 + 8)> {
  using Pages = CodePages<Page, Page*(Dim*(K::bits + V::bits) / 8 + 8)>;
  using Pages::halves;
  using Pages::unit;
  static constexpr int dim = Dim;
  static constexpr int key_row = Dim * K::bits / 8, value_row = Dim * V::bits / 8;  // bytes
  static constexpr int values = Page * key_row, key_meta = values + Page * value_row, value_meta = key_meta + Page * 4;
  // A lane has a quarter of a key, in chunks of 16 bytes or less, and an eighth of a value.
  static constexpr int key_words = key_row / 16, value_words = value_row / 32, own_keys = Dim / 4, own_values = Dim / 8;
  static constexpr int chunk = own_keys < 128 / K::bits ? own_keys : 128 / K::bits;  // elements
  static constexpr int tiles = Dim / 16;
  static_assert(key_words > 0 && value_words > 0);
  static_assert(Page == 16 || (values % 1024 == 0 && key_meta % 1024 == 0));

  static __device__ __forceinline__ int token_of(int g) {
    return static_cast<int>(token_order<key_row, value_row>() >> 4 * g & 7);
  }
  static __device__ __forceinline__ int element_of(int g, int e) { return g * own_values + e; }
  static __device__ __forceinline__ int query_element(int q, int i) { return (i / chunk * 4 + q) * chunk + i % chunk; }

  unsigned qf[own_keys / 2];  // B fragments of Q^T: columns are the query heads of the group
  float factor;               // of products
  // Of the lane's two columns: what the 1024 of codes add to a product, negated, and the sum of the query times factor.
  float bias[2], query_sum[2];
  float o[1][tiles][4], all[4];    // sums of shares times codes; of shares alone, which is what the 1024 of codes add
  float zeros[2];                  // sum of probabilities times zeros
  float most = 0, unit_scale = 1;  // scales up to `most` are multiplied by unit_scale, so that f16 holds the shares
  // Where the lane's tokens of a unit's first half lie, the second one 8 tokens on: keys and metadata of tile row g,
  // values of tile rows 2q and 2q + 1.
  unsigned key_at[2], key_meta_at[2], value_at[2][2], value_meta_at[2];
  int own_token, g, q;

  __device__ __forceinline__ CodeRows(const Args& a, const float4 (&asked)[1][Dim / 16], int group, int g, int q)
      : own_token(token_of(g)), g(g), q(q) {
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
    factor = 1 / scale;
    float own_bias = 0, own_sum = 0;
#pragma unroll
    for (int w = 0; w < key_words; ++w)
#pragma unroll
      for (int i = 0; i < K::per_word / 2; ++i) {
        const int e = w * K::per_word + i, n = K::shift_of(i);
        unsigned& to = qf[w * (K::per_word / 2) + i];
        const float power = (g < group ? scale : 0.f) / static_cast<float>(1 << n);
        to = Pair<__half>::pack(x[e] * power, x[e + K::per_word / 2] * power);
        float low, high;
        Pair<__half>::unpack(to, low, high);
        own_bias += low + high, own_sum += (low + high) * static_cast<float>(1 << n);
      }
    own_bias = sum_of_lanes<1, 2>(own_bias), own_sum = sum_of_lanes<1, 2>(own_sum);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int from = 4 * (2 * q + h);
      bias[h] = K::biased ? -1024 * __shfl_sync(~0u, own_bias, from) : 0.f;
      query_sum[h] = __shfl_sync(~0u, own_sum, from) * factor;
      zeros[h] = 0;
    }
#pragma unroll
    for (int t = 0; t < tiles; ++t) o[0][t][0] = o[0][t][1] = o[0][t][2] = o[0][t][3] = 0;
    all[0] = all[1] = all[2] = all[3] = 0;
    for (int r = 0; r < 2; ++r) {
      const int token = own_token + 8 * r;
      key_at[r] = Pages::place_of(token * key_row + q * chunk * K::bits / 8);
      key_meta_at[r] = Pages::place_of(key_meta + token * 4);
      value_meta_at[r] = Pages::place_of(value_meta + token * 4);
      for (int t = 0; t < 2; ++t)
        value_at[t][r] = Pages::place_of(values + (token_of(2 * q + t) + 8 * r) * value_row + g * value_words * 4);
    }
  }

  // Scores, times log2(e), of the unit's tokens at tile rows g + 8 r.
  __device__ __forceinline__ void score(unsigned at, float (&scores)[1][4 * halves]) const {
    unsigned k[halves][2][key_words], meta[halves][2];
#pragma unroll
    for (int u = 0; u < halves; ++u)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Pages::load_key(at + Pages::template half_of<key_row>(key_at[r], u), k[u][r]);
        meta[u][r] = load_shared4(at + Pages::template half_of<4>(key_meta_at[r], u));
      }
    float c[halves][2][4];  // two sums, so that a product need not wait for the one before
#pragma unroll
    for (int u = 0; u < halves; ++u) {
      c[u][0][0] = c[u][0][2] = bias[0], c[u][0][1] = c[u][0][3] = bias[1];
      c[u][1][0] = c[u][1][1] = c[u][1][2] = c[u][1][3] = 0;
    }
#pragma unroll
    for (int w = 0; w < key_words; ++w)
#pragma unroll
      for (int i = 0; i < K::per_word / 2; i += 2)
#pragma unroll
        for (int u = 0; u < halves; ++u) {
          const int f = w * (K::per_word / 2) + i;
          mma16816<__half>(c[u][f / 2 % 2], K::pair_of(k[u][0][w], i), K::pair_of(k[u][1][w], i),
                           K::pair_of(k[u][0][w], i + 1), K::pair_of(k[u][1][w], i + 1), qf[f], qf[f + 1]);
        }
#pragma unroll
    for (int u = 0; u < halves; ++u)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float scale, zero;
        Pair<__half>::unpack(meta[u][r], scale, zero);
        scale *= factor;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          scores[0][4 * u + 2 * r + h] = (c[u][0][2 * r + h] + c[u][1][2 * r + h]) * scale + zero * query_sum[h];
      }
  }

  // Adds the unit's first `valid` tokens. scores: -inf where nothing is seen; on return, the shares 2^(score - high).
  __device__ __forceinline__ void add(unsigned at, int valid, float (&scores)[1][4 * halves], float (&highs)[1][2],
                                      float (&sums)[1][2]) {
    float(&s)[4 * halves] = scores[0], (&high)[2] = highs[0], (&sum)[2] = sums[0];
    unsigned meta[2 * halves], w[halves][4][value_words];
#pragma unroll
    for (int u = 0; u < halves; ++u) {
#pragma unroll
      for (int r = 0; r < 2; ++r) meta[2 * u + r] = load_shared4(at + Pages::template half_of<4>(value_meta_at[r], u));
#pragma unroll
      for (int t = 0; t < 4; ++t)
        Pages::template load_words<value_words>(at + Pages::template half_of<value_row>(value_at[t % 2][t / 2], u),
                                                w[u][t]);
    }
    if (valid < unit) {  // what lies after the last token may be anything
#pragma unroll
      for (int r = 0; r < 2 * halves; ++r)
        if (own_token + 8 * r >= valid) meta[r] = 0;
      if constexpr (!V::biased)
#pragma unroll
        for (int u = 0; u < halves; ++u)
#pragma unroll
          for (int t = 0; t < 4; ++t)
            if (16 * u + token_of(2 * q + t % 2) + t / 2 * 8 >= valid)
#pragma unroll
              for (int i = 0; i < value_words; ++i) w[u][t][i] = 0;
    }
    float scale[2 * halves], zero[2 * halves], top[2] = {high[0], high[1]}, largest = most;
#pragma unroll
    for (int r = 0; r < 2 * halves; ++r) {
      Pair<__half>::unpack(meta[r], scale[r], zero[r]);
      largest = fmaxf(largest, scale[r]);
      for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], s[2 * r + h]);
    }
    // All three rise rarely.
    if (__any_sync(~0u, top[0] > high[0] || top[1] > high[1] || largest > most)) {
      largest = most_of_lanes<4, 16>(largest);
      float more = 1;
      if (largest > most) {  // it becomes 16 to 32
        const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
        const float fresh = __uint_as_float(static_cast<unsigned>(127 - exponent + 4) << 23);
        more = fresh / unit_scale, unit_scale = fresh, most = 1024 / fresh;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = most_of_lanes<4, 16>(top[h]);
        const float shrink = high[h] == -INFINITY ? 0.f : exp2_fast(high[h] - top[h]);
        high[h] = top[h];
        sum[h] *= shrink, zeros[h] *= shrink;
#pragma unroll
        for (int t = 0; t < tiles; ++t) o[0][t][h] *= shrink * more, o[0][t][2 + h] *= shrink * more;
        all[h] *= shrink * more, all[2 + h] *= shrink * more;
      }
    }
    const float shift[2] = {high[0] == -INFINITY ? 0.f : high[0], high[1] == -INFINITY ? 0.f : high[1]};
    unsigned p[2 * halves];
#pragma unroll
    for (int r = 0; r < 2 * halves; ++r) {
      const float x = exp2_fast(s[2 * r] - shift[0]), y = exp2_fast(s[2 * r + 1] - shift[1]),
                  share = scale[r] * unit_scale;
      s[2 * r] = x, s[2 * r + 1] = y;
      sum[0] += x, sum[1] += y;
      zeros[0] += x * zero[r], zeros[1] += y * zero[r];
      p[r] = Pair<__half>::pack(x * share, y * share);
    }
#pragma unroll
    for (int r = 0; r < 2 * halves; ++r) p[r] = transpose8x8(p[r]);
#pragma unroll
    for (int u = 0; u < halves; ++u) {
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        const int word = 2 * t / V::per_word, i = 2 * t % V::per_word;
        const unsigned(&v)[4][value_words] = w[u];
        mma16816<__half>(o[0][t], V::tokens_of(v[0][word], v[1][word], i), V::tokens_of(v[0][word], v[1][word], i + 1),
                         V::tokens_of(v[2][word], v[3][word], i), V::tokens_of(v[2][word], v[3][word], i + 1), p[2 * u],
                         p[2 * u + 1]);
      }
      if constexpr (V::biased) {
        constexpr unsigned ones = 0x3c003c00;
        mma16816<__half>(all, ones, ones, ones, ones, p[2 * u], p[2 * u + 1]);
      }
    }
  }

  // o = sums of probabilities times values.
  __device__ __forceinline__ void finish() {
    const float inverse = 1 / unit_scale;  // exact: it is a power of two
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      zeros[h] = sum_of_lanes<4, 16>(zeros[h]);
#pragma unroll
      for (int t = 0; t < tiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& x = o[0][t][2 * r + h];
          if constexpr (V::biased) x = (x - 1024 * all[h]) / static_cast<float>(1 << V::shift_of(2 * t + r));
          x = x * inverse + zeros[h];
        }
    }
  }
};

}  // namespace kvlab::ops::decode
