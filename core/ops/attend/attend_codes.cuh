// Rows of codes in the kernel of decode steps (attend_kernel.cuh): x = code * scale + zero, with one scale and zero for
// each token's key and value. A unit is a page of 32 tokens or two of 16. A page's keys, values, scales and zeros come
// in one bulk copy. Both halves of a unit are multiplied side by side, so that each hides the other's latencies.
//
// The tensor cores multiply the codes themselves. Those of keys are bytes: with 4 bits one logical operation makes
// bytes of every second code, times 1 or 16. A query is an integer of 16 bits, relative to its largest element, and
// goes in as two bytes. Products are exact, and their sum is
//   256 sum high code + sum low code.
//
// Codes of values become f16 by one logical operation: the bits of 1024 and of the code times 2^n, where n is the
// code's place in a byte. So products with shares are
//   sum p (1024 + 2^n code) / 2^n = sum p code + 1024 sum p / 2^n.
// Scales and zeros of keys apply to the scores of a token. Those of values go with the token's probability: the scale
// into it, the zero into a sum of its own.
//
// A tile has eight columns. With four query heads or fewer, columns 4 to 7 have the low bytes of the queries. Their
// lanes then take the tokens 8 on, so that each lane has half as many scores.
#pragma once
#include "base/lanes.cuh"
#include "ops/attend/attend_kernel.cuh"

namespace kvlab::ops::decode {

// Codes of Bits bits, element e of a row at bit e * Bits.
template <int Bits>
struct Codes {
  static constexpr int bits = Bits;
  static constexpr bool integer = true;
  static constexpr int per_word = 32 / Bits;
  // The power of two that element e of a word carries.
  static constexpr int shift_of(int e) { return e * Bits % 8; }
  // Elements i of both halves of a word, as f16; i < 16 / Bits.
  static __device__ __forceinline__ unsigned halves_of(unsigned word, int i) {
    const unsigned mask = ((1u << Bits) - 1u) * 0x10001u << shift_of(i);
    return and_or(word >> i * Bits / 8 * 8, mask, 0x64006400u);
  }
  // Every code that is at place `part` of its byte, as a byte that has it times 2^(part * Bits).
  static __device__ __forceinline__ unsigned bytes_of(unsigned word, int part) {
    return Bits == 8 ? word : word & ((1u << Bits) - 1u) * 0x01010101u << part * Bits;
  }
};

struct E4m3 {
  static constexpr int bits = 8;
  static constexpr bool integer = false;
  static constexpr int per_word = 4;
  static constexpr int shift_of(int) { return 0; }
  static __device__ __forceinline__ unsigned halves_of(unsigned word, int i) {
    return halves_of_e4m3(__byte_perm(word, 0, i ? 0x4431 : 0x4420));
  }
};

// Token of tile row g, as token_of: no load of keys has a bank conflict. Those of values have none in any order.
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

template <class K, class V, int Dim, int Page, bool Few>
struct CodeRows : CodePages<Page, Page*(Dim*(K::bits + V::bits) / 8 + 8)>, Columns<Few> {
  using Pages = CodePages<Page, Page*(Dim*(K::bits + V::bits) / 8 + 8)>;
  using Columns<Few>::pair_of;
  using Columns<Few>::row_step;
  using Columns<Few>::rows_on;
  using Pages::halves;
  using Pages::unit;
  static constexpr int dim = Dim;
  static constexpr int key_row = Dim * K::bits / 8, value_row = Dim * V::bits / 8;  // bytes
  static constexpr int values = Page * key_row, key_meta = values + Page * value_row, value_meta = key_meta + Page * 4;
  // A lane has a quarter of a key, in chunks of 16 bytes or less, and two bytes of each 16 of a value.
  static constexpr int key_words = key_row / 16, own_keys = Dim / 4, chunks = value_row / 16, per_chunk = 16 / V::bits;
  static constexpr int chunk = own_keys < 128 / K::bits ? own_keys : 128 / K::bits;  // elements
  static constexpr int tiles = Dim / 16, rows = unit / row_step;                     // rows: tokens of a lane
  // Integer keys: codes of a byte; sums of products, so that one need not wait for the one before.
  static constexpr int parts = 8 / K::bits, key_sums = parts < 2 ? 2 : parts;
  static constexpr int query_words = K::integer ? (Few ? 1 : 2) * own_keys / 4 : own_keys / 2;
  static constexpr float most_query = 127 * 256;
  static_assert(key_words > 0 && chunks % 2 == 0);
  static_assert(Page == 16 || (values % 1024 == 0 && key_meta % 1024 == 0));

  static __device__ __forceinline__ int token_of(int g) {
    return static_cast<int>(token_order<key_row, value_row>() >> 4 * g & 7);
  }
  static constexpr int element_run = per_chunk < 4 ? per_chunk : 4;  // elements that follow each other
  static __device__ __forceinline__ int element_of(int g, int e) {
    return (e / per_chunk * 8 + g) * per_chunk + e % per_chunk;
  }
  static __device__ __forceinline__ int query_element(int q, int i) { return (i / chunk * 4 + q) * chunk + i % chunk; }

  // B fragments of Q^T: columns are the query heads of the group. Bytes: the high ones, then the low ones, or with few
  // heads those of the lane's column.
  unsigned qf[query_words];
  float factor[2], query_sum[2];   // of the lane's two heads: of products; the sum of the query
  float o[1][tiles][4], all[4];    // sums of shares times codes; of shares alone, which is what the 1024 of codes add
  float zeros[2];                  // sum of probabilities times zeros
  float most = 0, unit_scale = 1;  // scales up to `most` are multiplied by unit_scale, so that f16 holds the shares
  // Where the lane's data of a unit's first half lie: keys of tile rows g and g + 8, metadata of its tokens, and the
  // row of values that it has the address of.
  unsigned key_at[2], key_meta_at[16 / row_step], value_meta_at[16 / row_step], value_at;
  int own_token, g, q;

  __device__ __forceinline__ CodeRows(const Args& a, const float4 (&asked)[1][Dim / 16], int group, int g, int q)
      : own_token(token_of(g) + rows_on(q)), g(g), q(q) {
    float x[own_keys], top = 0, own_sum = 0;
#pragma unroll
    for (int i = 0; i < own_keys / 4; ++i)
      x[4 * i] = asked[0][i].x, x[4 * i + 1] = asked[0][i].y, x[4 * i + 2] = asked[0][i].z,
            x[4 * i + 3] = asked[0][i].w;
#pragma unroll
    for (int i = 0; i < own_keys; ++i) x[i] *= a.scale, top = fmaxf(top, fabsf(x[i])), own_sum += x[i];
    // Scores of heads that are not there are 0, so that their maxima never rise.
    const bool asks = this->head_of(g) < group;
    top = most_of_lanes<1, 2>(top), own_sum = sum_of_lanes<1, 2>(asks ? own_sum : 0.f);
    float own_factor;
    if constexpr (K::integer) {
      const float scale = asks && top > 0 ? most_query / top : 0.f;
      own_factor = top / (most_query * (1 << (8 - K::bits)));
      const int low = Few && g >= 4 ? 0 : 8;
#pragma unroll
      for (int w = 0; w < key_words; ++w)
#pragma unroll
        for (int part = 0; part < parts; ++part) {
          unsigned& to = qf[w * parts + part];
          to = 0;
          if constexpr (!Few) qf[own_keys / 4 + w * parts + part] = 0;
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const auto number = static_cast<unsigned>(__float2int_rn(x[w * K::per_word + b * parts + part] * scale));
            // The low byte has a sign, which the high one makes up for.
            to |= (number + (low ? 128u : 0u) >> low & 0xffu) << 8 * b;
            if constexpr (!Few) qf[own_keys / 4 + w * parts + part] |= (number & 0xffu) << 8 * b;
          }
        }
    } else {
      // The head's largest element becomes 16 to 32.
      const int exponent = max(-100, min(100, static_cast<int>(__float_as_uint(top) >> 23) - 127));
      const float scale = __uint_as_float(static_cast<unsigned>(127 - exponent + 4) << 23);
      own_factor = 1 / scale;
#pragma unroll
      for (int w = 0; w < key_words; ++w)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float power = g < group ? scale : 0.f;  // columns 4 to 7 of few heads are 0
          qf[2 * w + i] = Pair<__half>::pack(x[4 * w + i] * power, x[4 * w + i + 2] * power);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int from = 4 * (2 * pair_of(q) + h);
      factor[h] = __shfl_sync(~0u, own_factor, from), query_sum[h] = __shfl_sync(~0u, own_sum, from);
      zeros[h] = 0;
    }
#pragma unroll
    for (int t = 0; t < tiles; ++t) o[0][t][0] = o[0][t][1] = o[0][t][2] = o[0][t][3] = 0;
    all[0] = all[1] = all[2] = all[3] = 0;
#pragma unroll
    for (int r = 0; r < 16 / row_step; ++r) {
      const int token = own_token + row_step * r;
      key_meta_at[r] = Pages::place_of(key_meta + token * 4);
      value_meta_at[r] = Pages::place_of(value_meta + token * 4);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) key_at[r] = Pages::place_of((token_of(g) + 8 * r) * key_row + q * chunk * K::bits / 8);
    // Matrices of a load: first and second eight tokens of a chunk, then of the next one.
    const int lane = 4 * g + q, matrix = lane / 8;
    value_at = Pages::place_of(values + (token_of(lane % 8) + matrix % 2 * 8) * value_row + matrix / 2 * 16);
  }

  // Scores, times log2(e), of the unit's tokens at tile rows g + row_step r.
  __device__ __forceinline__ void score(unsigned at, float (&scores)[1][2 * rows]) const {
    unsigned k[halves][2][key_words], meta[rows];
#pragma unroll
    for (int u = 0; u < halves; ++u) {
#pragma unroll
      for (int r = 0; r < 2; ++r) Pages::load_key(at + Pages::template half_of<key_row>(key_at[r], u), k[u][r]);
#pragma unroll
      for (int r = 0; r < rows / halves; ++r)
        meta[rows / halves * u + r] = load_shared4(at + Pages::template half_of<4>(key_meta_at[r], u));
    }
    float products[2 * rows];
    if constexpr (K::integer)
      multiply_bytes(k, products);
    else
      multiply_halves(k, products);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      float scale, zero;
      Pair<__half>::unpack(meta[r], scale, zero);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        scores[0][2 * r + h] = products[2 * r + h] * (scale * factor[h]) + zero * query_sum[h];
    }
  }

  // Adds the unit's first `valid` tokens. scores: -inf where nothing is seen; on return, the shares 2^(score - high).
  __device__ __forceinline__ void add(unsigned at, int valid, float (&scores)[1][2 * rows], float (&highs)[1][2],
                                      float (&sums)[1][2]) {
    float(&s)[2 * rows] = scores[0], (&high)[2] = highs[0], (&sum)[2] = sums[0];
    unsigned meta[rows], w[halves][chunks / 2][4];
#pragma unroll
    for (int u = 0; u < halves; ++u) {
#pragma unroll
      for (int r = 0; r < rows / halves; ++r)
        meta[rows / halves * u + r] = load_shared4(at + Pages::template half_of<4>(value_meta_at[r], u));
#pragma unroll
      for (int i = 0; i < chunks / 2; ++i)
        load_transposed(at + (Pages::template half_of<value_row>(value_at, u) ^ static_cast<unsigned>(32 * i)),
                        w[u][i]);
    }
    if (valid < unit) {  // what lies after the last token may be anything
#pragma unroll
      for (int r = 0; r < rows; ++r)
        if (own_token + row_step * r >= valid) meta[r] = 0;
      if constexpr (!V::integer)
#pragma unroll
        for (int u = 0; u < halves; ++u)
#pragma unroll
          for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int t = 0; t < 2; ++t)
              if (16 * u + token_of(2 * q + t) + 8 * r >= valid)
#pragma unroll
                for (int i = 0; i < chunks; ++i) w[u][i / 2][i % 2 * 2 + r] &= t ? 0xffffu : 0xffff0000u;
    }
    float scale[rows], zero[rows], top[2] = {high[0], high[1]}, largest = most;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      Pair<__half>::unpack(meta[r], scale[r], zero[r]);
      largest = fmaxf(largest, scale[r]);
      for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], s[2 * r + h]);
    }
    // All three rise rarely.
    if (__any_sync(~0u, top[0] > high[0] || top[1] > high[1] || largest > most)) {
      largest = most_of_lanes<Columns<Few>::nearest, 16>(largest);
      float more = 1;
      if (largest > most) {  // it becomes 16 to 32
        const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
        const float fresh = __uint_as_float(static_cast<unsigned>(127 - exponent + 4) << 23);
        more = fresh / unit_scale, unit_scale = fresh, most = 1024 / fresh;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = most_of_lanes<Columns<Few>::nearest, 16>(top[h]);
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
    for (int r = 0; r < rows; ++r) {
      const float x = exp2_fast(s[2 * r] - shift[0]), y = exp2_fast(s[2 * r + 1] - shift[1]),
                  share = scale[r] * unit_scale;
      s[2 * r] = x, s[2 * r + 1] = y;
      sum[0] += x, sum[1] += y;
      zeros[0] += x * zero[r], zeros[1] += y * zero[r];
      p[r * (row_step / 8)] = Pair<__half>::pack(x * share, y * share);
    }
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      unsigned& own = p[r * (row_step / 8)];
      own = transpose8x8(own);
      // Rows 4 to 7 are the same heads for the tokens 8 on. Columns 4 to 7 of the sums are of no head.
      if constexpr (Few) p[2 * r + 1] = __shfl_xor_sync(~0u, own, 16);
    }
#pragma unroll
    for (int u = 0; u < halves; ++u) {
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        const int of = 2 * t / per_chunk, i = 2 * t % per_chunk;
        const unsigned first = w[u][of / 2][of % 2 * 2], second = w[u][of / 2][of % 2 * 2 + 1];
        mma16816<__half>(o[0][t], V::halves_of(first, i), V::halves_of(first, i + 1), V::halves_of(second, i),
                         V::halves_of(second, i + 1), p[2 * u], p[2 * u + 1]);
      }
      if constexpr (V::integer) {
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
      zeros[h] = sum_of_lanes<Columns<Few>::nearest, 16>(zeros[h]);
#pragma unroll
      for (int t = 0; t < tiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& x = o[0][t][2 * r + h];
          if constexpr (V::integer) x = (x - 1024 * all[h]) / static_cast<float>(1 << V::shift_of(2 * t + r));
          x = x * inverse + zeros[h];
        }
    }
  }

 private:
  // Products of queries and the codes of keys, [2 r + h].
  __device__ __forceinline__ void multiply_bytes(const unsigned (&k)[halves][2][key_words],
                                                 float (&products)[2 * rows]) const {
    constexpr int bytes = Few ? 1 : 2;
    int c[halves][bytes][key_sums][4] = {};
#pragma unroll
    for (int w = 0; w < key_words; w += 2)
#pragma unroll
      for (int part = 0; part < parts; ++part)
#pragma unroll
        for (int u = 0; u < halves; ++u)
#pragma unroll
          for (int byte = 0; byte < bytes; ++byte) {
            const unsigned* const qs = qf + byte * (own_keys / 4);
            constexpr bool alone = key_words == 1;
            mma16832(c[u][byte][parts == 1 ? w / 2 % 2 : part], K::bytes_of(k[u][0][w], part),
                     K::bytes_of(k[u][1][w], part), alone ? 0 : K::bytes_of(k[u][0][w + !alone], part),
                     alone ? 0 : K::bytes_of(k[u][1][w + !alone], part), qs[w * parts + part],
                     alone ? 0 : qs[(w + !alone) * parts + part]);
          }
    // Each code counts as its product with 2^(8 - bits).
    const auto total = [&](const int(&sums)[key_sums][4], int i) {
      int x = sums[0][i];
#pragma unroll
      for (int n = 1; n < key_sums; ++n) x = parts == 1 ? x + sums[n][i] : (x << K::bits) + sums[n][i];
      return x;
    };
#pragma unroll
    for (int u = 0; u < halves; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (Few) {
          const bool low = q >= 2;
          const int first = total(c[u][0], h), second = total(c[u][0], 2 + h);
          const int own = low ? second : first, others = __shfl_xor_sync(~0u, low ? first : second, 2);
          products[2 * u + h] = __int2float_rn(low ? others * 256 + own : own * 256 + others);
        } else {
#pragma unroll
          for (int r = 0; r < 2; ++r)
            products[4 * u + 2 * r + h] =
                __int2float_rn(total(c[u][0], 2 * r + h) * 256 + total(c[u][bytes - 1], 2 * r + h));
        }
      }
  }
  __device__ __forceinline__ void multiply_halves(const unsigned (&k)[halves][2][key_words],
                                                  float (&products)[2 * rows]) const {
    float c[halves][2][4] = {};  // two sums, so that a product need not wait for the one before
#pragma unroll
    for (int w = 0; w < key_words; ++w)
#pragma unroll
      for (int u = 0; u < halves; ++u)
        mma16816<__half>(c[u][w % 2], K::halves_of(k[u][0][w], 0), K::halves_of(k[u][1][w], 0),
                         K::halves_of(k[u][0][w], 1), K::halves_of(k[u][1][w], 1), qf[2 * w], qf[2 * w + 1]);
#pragma unroll
    for (int u = 0; u < halves; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float first = c[u][0][h] + c[u][1][h], second = c[u][0][2 + h] + c[u][1][2 + h];
        if constexpr (Few) {
          const float others = __shfl_xor_sync(~0u, second, 2);
          products[2 * u + h] = q >= 2 ? others : first;
        } else {
          products[4 * u + h] = first, products[4 * u + 2 + h] = second;
        }
      }
  }
};

}  // namespace kvlab::ops::decode
