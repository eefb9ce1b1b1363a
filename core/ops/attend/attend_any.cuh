// A warp's work on a batch of 32 tokens, for attend_any.cu. Keys: four lanes share a token, each with every fourth
// chunk of its row. They score four tokens at once, so that one load of the queries from shared memory serves four
// tokens. Softmax: a lane owns a token and the scale and zero of its codes. Values: a lane owns a chunk of head_dim.
#pragma once
#include "base/lanes.cuh"
#include "ops/attend/attend_unit.cuh"
#include "ops/attend/prompt_mask.cuh"
#include "ops/page/paged.cuh"

namespace kvlab::ops::decode_any {

using namespace cuda;
constexpr int warps = 4, threads = warps * 32, batch = 32, sets = 4;  // batch: tokens of a warp; sets: of four lanes
constexpr int chunk_elements = 8, most_dim = 256;

enum class Elements { code8, code4, code2, e4m3, half, bfloat, single };

// Codes in place of a type of elements.
template <int Bits, CodeKind Kind = CodeKind::integer>
struct Code {};

template <class T>
inline constexpr int bits_of = 8 * static_cast<int>(sizeof(T));
template <int Bits, CodeKind Kind>
inline constexpr int bits_of<Code<Bits, Kind>> = Bits;
template <class T>
inline constexpr bool coded = false;
template <int Bits, CodeKind Kind>
inline constexpr bool coded<Code<Bits, Kind>> = true;

struct Args {
  DeviceKv kv;
  View<const float, 3> queries;
  View<const std::int32_t, 3> list;        // pages, or tokens if entry_tokens is 1
  View<const std::int32_t, 2> list_count;  // null = no list
  View<float, 3> out, mass;
  View<float, 2> lse;
  HeadLogits logits;
  View<const float, 3> bias;
  const std::int32_t* last;
  const std::int32_t* rank;  // [row, kv_head, room], cache_relative only
  float2* softmax;           // [row, query head, part] maximum in units of log2, and sum
  float* part_out;           // [row, query head, part, head_dim], not yet divided
  float* shift;              // [row, query head] lse in units of log2
  Elements keys, values;
  bool grouped_keys, grouped_values;  // codes whose scales belong to groups
  // Which tokens of a head this launch reads, and the codec of their pages. `rest` comes behind `lower`. With a list,
  // each of both looks at every entry and skips those of the other.
  enum Run : int { all, lower, rest } run;
  int codec;
  int room, window, group, head_sets, part_tokens, parts;
  const PromptMask* masks;  // [kv_head], or null
  int entry_tokens;         // tokens of a list entry
  float scale;              // times log2(e), and times RoPE's scale if keys are rotated
};

// Tokens in pages of the second codec.
__device__ int lower_tokens(const Args& a, int row, int kv_head) {
  const auto& pages = a.kv.kv.lower_pages;
  const int slot = a.kv.kv.slots[row], lower = pages.data[slot * pages.stride[0] + kv_head * pages.stride[1]];
  return min(lower * a.kv.page_size, a.kv.tokens(row, kv_head));
}
__device__ int tokens_in_front(const Args& a, int row, int kv_head) {
  return a.run == Args::rest ? lower_tokens(a, row, kv_head) : 0;
}

// Number of places that the parts divide: those of the listed pages or tokens, else all of the launch.
__device__ int places(const Args& a, int row, int kv_head) {
  if (!a.list_count.data)
    return a.run == Args::lower ? lower_tokens(a, row, kv_head)
                                : a.kv.tokens(row, kv_head) - tokens_in_front(a, row, kv_head);
  const int most = static_cast<int>(min(std::int64_t{a.room / a.entry_tokens}, a.list.extent[2]));
  return min(max(a.list_count(row, kv_head), 0), most) * a.entry_tokens;
}
__device__ int parts_in_front(const Args& a, int row, int kv_head) {
  if (a.run != Args::rest) return 0;
  const int before = a.list_count.data ? places(a, row, kv_head) : lower_tokens(a, row, kv_head);
  return (before + a.part_tokens - 1) / a.part_tokens;
}

// Loads `bits`; less than a word fills its low bits.
template <int bits, int Words>
__device__ __forceinline__ void load(const std::byte* from, unsigned (&to)[Words]) {
  if constexpr (bits == 8) {
    to[0] = static_cast<unsigned>(*from);
  } else if constexpr (bits == 16) {
    to[0] = *reinterpret_cast<const unsigned short*>(from);
  } else if constexpr (Words == 1) {
    to[0] = *reinterpret_cast<const unsigned*>(from);
  } else if constexpr (Words == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < Words / 4; ++i) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = x.x, to[4 * i + 1] = x.y, to[4 * i + 2] = x.z, to[4 * i + 3] = x.w;
    }
  }
}

// Unpacks the `count` elements of one load; codes stay unscaled.
template <class T, int count, int Words>
__device__ __forceinline__ void unpack(const unsigned (&from)[Words], float* to) {
#pragma unroll
  for (int i = 0; i < Words; ++i) {
    if constexpr (std::is_same_v<T, Code<8>>) {
#pragma unroll
      for (int b = 0; b < 4; ++b)  // the word is the float 2^23 + code
        to[4 * i + b] = __uint_as_float(__byte_perm(from[i], 0x4b000000u, 0x7440u + b)) - 8388608.f;
    } else if constexpr (coded<T>) {
      constexpr int each = 32 / bits_of<T>;
#pragma unroll
      for (int b = 0; b < each && b < count; ++b) {
        const unsigned code = from[i] >> bits_of<T> * b & static_cast<unsigned>(most_code(bits_of<T>));
        if constexpr (bits_of<T> == 8)
          to[each * i + b] = from_e4m3(code);
        else
          to[each * i + b] = __uint_as_float(0x4b000000u | code) - 8388608.f;
      }
    } else if constexpr (std::is_same_v<T, float>) {
      to[i] = __uint_as_float(from[i]);
    } else {
      Pair<T>::unpack(from[i], to[2 * i], to[2 * i + 1]);
    }
  }
}

// A lane's token: byte offsets of its rows from the tier's base, -1 if the lane has no token to attend.
struct Token {
  std::int64_t key = -1, value = -1;
  float2 key_code = {1, 0}, value_code = {1, 0};  // x = code * .x + .y
  int place = -1, rank = 0, offset = 0;
};
// The lane that owns token x of a batch. The four lanes that score tokens g, g + 8, .. own one of these each.
__device__ __forceinline__ int owner_of(int x) { return 4 * (x % 8) + x / 8; }

__device__ float2 code_of(const std::byte* side, int offset) {
  const __half* code = reinterpret_cast<const __half*>(side) + 2 * offset;
  return make_float2(__half2float(code[0]), __half2float(code[1]));
}

// A token's place in the cache, t = -1 if there is no such token. Lanes look it up one batch ahead.
struct Place {
  int t = -1, offset = 0;
  std::int32_t frame = 0;
};
__device__ __forceinline__ Place find_place(const Args& a, int row, int kv_head, int x, int end) {
  Place place;
  if (x >= end) return place;
  const int p = a.kv.page_size;
  int t = x;
  if (a.list_count.data) {
    const int number = x / a.entry_tokens;
    t += (a.list(row, kv_head, number) - number) * a.entry_tokens;
    if (a.run != Args::all && (t < lower_tokens(a, row, kv_head)) != (a.run == Args::lower)) return place;
  } else {
    t += tokens_in_front(a, row, kv_head);
  }
  if (static_cast<unsigned>(t) >= static_cast<unsigned>(a.kv.tokens(row, kv_head))) return place;
  const int page = t / p;
  place.t = t, place.offset = t - page * p, place.frame = a.kv.entry(row, kv_head, page).frame;
  return place;
}

__device__ __forceinline__ Token look_up(const Args& a, int row, int kv_head, const Place& place) {
  Token token;
  if (place.t < 0) return token;
  const PageLayout& l = a.kv.layouts[a.codec];
  const int offset = place.offset;
  const std::int64_t frame = std::int64_t(place.frame) * granule_bytes;
  const std::byte* at = a.kv.kv.base + frame;
  token.place = place.t;
  if (a.window > 0 && reinterpret_cast<const std::int32_t*>(at + l.positions)[offset] <= a.last[row] - a.window)
    return token;
  if (a.masks && hides(a.masks[kv_head], reinterpret_cast<const std::int32_t*>(at + l.positions)[offset], a.last[row]))
    return token;
  token.key = frame + row_offset(l, true, offset);
  token.value = frame + row_offset(l, false, offset);
  if (a.keys <= Elements::e4m3 && !a.grouped_keys) token.key_code = code_of(at + l.k_meta, offset);
  if (a.values <= Elements::e4m3 && !a.grouped_values) token.value_code = code_of(at + l.v_meta, offset);
  token.offset = offset;
  if (a.rank) token.rank = a.rank[(std::int64_t(row) * a.kv.kv_heads + kv_head) * a.room + place.t];
  return token;
}

template <int Heads>
struct Queries {
  float4 x[Heads][most_dim / 4];
  float sum[Heads];
  float2 turns[most_dim / 2];
};

// Turns codes of a grouped side, from element d on, into numbers. row: byte offset of the token's row.
template <int count = 8>
__device__ __forceinline__ void scale_groups(const Args& a, bool key, std::int64_t row, int offset, int d, float* x) {
  const PageLayout& l = a.kv.layouts[a.codec];
  const CodecSide side = side_of(l, key);
  const std::byte* metas = a.kv.kv.base + row - row_offset(l, key, offset) + meta_offset(l, key, offset, d);
  // Neighbours along the axis of tokens share a scale, those of channels do not. One division is for all of them.
  const int sharers = side.axis == CodeAxis::channel ? 1 : group_of(side, l.page_size, l.head_dim);
  int at = 0, left = sharers - d % sharers;
#pragma unroll
  for (int e = 0; e < count; ++e) {
    const float2 code = code_of(metas, at);
    x[e] = fmaf(x[e], code.x, code.y);
    if (--left == 0) left = sharers, ++at;
  }
}

// s += dot products of eight elements with the queries: four at query vector `low` and four at `high`.
template <int Heads>
__device__ __forceinline__ void multiply(const float (&x)[sets][8], const Queries<Heads>& q, int low, int high,
                                         float (&s)[Heads][sets]) {
#pragma unroll
  for (int h = 0; h < Heads; ++h) {
    const float4 q0 = q.x[h][low], q1 = q.x[h][high];
#pragma unroll
    for (int u = 0; u < sets; ++u) {
      float sum = s[h][u];
      sum = fmaf(x[u][0], q0.x, sum), sum = fmaf(x[u][1], q0.y, sum);
      sum = fmaf(x[u][2], q0.z, sum), sum = fmaf(x[u][3], q0.w, sum);
      sum = fmaf(x[u][4], q1.x, sum), sum = fmaf(x[u][5], q1.y, sum);
      sum = fmaf(x[u][6], q1.z, sum), sum = fmaf(x[u][7], q1.w, sum);
      s[h][u] = sum;
    }
  }
}

// A lane's share of the scores of tokens g, g + 8, g + 16, g + 24, g = lane / 4.
template <class T, int Heads>
__device__ __forceinline__ void score(const Args& a, const Token& own, const Queries<Heads>& q,
                                      float (&s)[Heads][sets]) {
  constexpr int bits = chunk_elements * bits_of<T>, words = (bits + 31) / 32, ahead = bits < 64 ? 4 : 256 / bits;
  const int lane = threadIdx.x % 32, chunks = a.kv.head_dim / chunk_elements;
  std::int64_t row[sets];
#pragma unroll
  for (int u = 0; u < sets; ++u) row[u] = __shfl_sync(~0u, own.key, (lane & ~3) + u);
  int offset[sets] = {};
  if (coded<T> && a.grouped_keys)
#pragma unroll
    for (int u = 0; u < sets; ++u) offset[u] = __shfl_sync(~0u, own.offset, (lane & ~3) + u);
  for (int first = lane % 4; first < chunks; first += 4 * ahead) {
    unsigned raw[ahead][sets][words] = {};
#pragma unroll
    for (int i = 0; i < ahead; ++i)
#pragma unroll
      for (int u = 0; u < sets; ++u)
        if (row[u] >= 0 && first + 4 * i < chunks)
          load<bits>(a.kv.kv.base + row[u] + (first + 4 * i) * (bits / 8), raw[i][u]);
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const int chunk = first + 4 * i;
      if (chunk >= chunks) continue;
      float x[sets][8];
#pragma unroll
      for (int u = 0; u < sets; ++u) {
        unpack<T, chunk_elements>(raw[i][u], x[u]);
        if (coded<T> && a.grouped_keys && row[u] >= 0)
          scale_groups(a, true, row[u], offset[u], chunk * chunk_elements, x[u]);
      }
      multiply(x, q, 2 * chunk, 2 * chunk + 1, s);
    }
  }
}

// The same for keys that RoPE has yet to rotate: four pairs (i, i + head_dim / 2) at a time.
template <class T, int Heads>
__device__ __forceinline__ void score_turned(const Args& a, const Token& own, const Queries<Heads>& q,
                                             float (&s)[Heads][sets]) {
  constexpr int bits = 4 * bits_of<T>, words = (bits + 31) / 32;
  const int lane = threadIdx.x % 32, half = a.kv.head_dim / 8;  // half of head_dim in loads of four elements
  std::int64_t row[sets];
  float rank[sets];
  float2 code[sets];
  int offset[sets];
#pragma unroll
  for (int u = 0; u < sets; ++u) {
    const int owner = (lane & ~3) + u;
    row[u] = __shfl_sync(~0u, own.key, owner);
    rank[u] = static_cast<float>(__shfl_sync(~0u, own.rank, owner));
    offset[u] = __shfl_sync(~0u, own.offset, owner);
    code[u] = {__shfl_sync(~0u, own.key_code.x, owner), __shfl_sync(~0u, own.key_code.y, owner)};
  }
  for (int i = lane % 4; i < half; i += 4) {
    unsigned low[sets][words] = {}, high[sets][words] = {};
#pragma unroll
    for (int u = 0; u < sets; ++u)
      if (row[u] >= 0) {
        load<bits>(a.kv.kv.base + row[u] + i * (bits / 8), low[u]);
        load<bits>(a.kv.kv.base + row[u] + (half + i) * (bits / 8), high[u]);
      }
    float x[sets][8];
#pragma unroll
    for (int u = 0; u < sets; ++u) {
      unpack<T, 4>(low[u], x[u]), unpack<T, 4>(high[u], x[u] + 4);
      if (coded<T> && a.grouped_keys && row[u] >= 0) {
        scale_groups<4>(a, true, row[u], offset[u], 4 * i, x[u]);
        scale_groups<4>(a, true, row[u], offset[u], 4 * (half + i), x[u] + 4);
      } else if constexpr (coded<T>)
#pragma unroll
        for (float& e : x[u]) e = fmaf(e, code[u].x, code[u].y);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 turn = q.turns[4 * i + e];
#pragma unroll
      for (int u = 0; u < sets; ++u) {
        const float most = __fmul_rn(rank[u], turn.x), rest = fmaf(rank[u], turn.x, -most) + rank[u] * turn.y;
        const float angle = 6.283185307f * ((most - rintf(most)) + rest);
        const float c = __cosf(angle), n = __sinf(angle), k0 = x[u][e], k1 = x[u][4 + e];
        x[u][e] = k0 * c - k1 * n, x[u][4 + e] = k1 * c + k0 * n;
      }
    }
    multiply(x, q, i, half + i, s);
  }
}

template <int Heads>
__device__ __forceinline__ void load_shares(const float* shares, int x, float (&to)[Heads]) {
  if constexpr (Heads % 4) {
#pragma unroll
    for (int h = 0; h < Heads; ++h) to[h] = shares[x * Heads + h];
  } else {
#pragma unroll
    for (int v = 0; v < Heads / 4; ++v) {
      const float4 s = reinterpret_cast<const float4*>(shares)[x * (Heads / 4) + v];
      to[4 * v] = s.x, to[4 * v + 1] = s.y, to[4 * v + 2] = s.z, to[4 * v + 3] = s.w;
    }
  }
}

// o += shares times values. A lane holds elements of chunk lane % lanes of every (32 / lanes)-th token.
template <class T, int Heads>
__device__ __forceinline__ void add_values(const Args& a, const Token& own, int tokens, int lanes, const float* shares,
                                           float (&o)[Heads][8]) {
  constexpr int bits = chunk_elements * bits_of<T>, words = (bits + 31) / 32, ahead = bits == 256 ? 4 : 8;
  const int lane = threadIdx.x % 32, each = 32 / lanes, chunk = lane % lanes;
  const bool idle = chunk * chunk_elements >= a.kv.head_dim;
  for (int first = 0; first * each < tokens; first += ahead) {
    unsigned raw[ahead][words] = {};
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const int x = (first + i) * each + lane / lanes;
      const std::int64_t row = __shfl_sync(~0u, own.value, owner_of(x % batch));
      if (row >= 0 && x < batch && !idle) load<bits>(a.kv.kv.base + row + chunk * (bits / 8), raw[i]);
    }
    std::int64_t rows[ahead];
    int offsets[ahead];
    if (coded<T> && a.grouped_values)
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const int owner = owner_of(((first + i) * each + lane / lanes) % batch);
        rows[i] = __shfl_sync(~0u, own.value, owner), offsets[i] = __shfl_sync(~0u, own.offset, owner);
      }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const int x = (first + i) * each + lane / lanes;
      if (x >= batch) continue;
      float value[8], share[Heads];
      load_shares(shares, x, share);
      unpack<T, chunk_elements>(raw[i], value);
      if (coded<T> && a.grouped_values && rows[i] >= 0 && !idle)
        scale_groups(a, false, rows[i], offsets[i], chunk * chunk_elements, value);
#pragma unroll
      for (int h = 0; h < Heads; ++h) {
#pragma unroll
        for (int e = 0; e < 8; ++e) o[h][e] = fmaf(share[h], value[e], o[h][e]);
      }
    }
  }
}

// Calls f(T{}) with the type of the elements.
template <class F>
__device__ __forceinline__ void with_type(Elements elements, const F& f) {
  switch (elements) {
    case Elements::code8: return f(Code<8>{});
    case Elements::code4: return f(Code<4>{});
    case Elements::code2: return f(Code<2>{});
    case Elements::e4m3: return f(Code<8, CodeKind::e4m3>{});
    case Elements::half: return f(__half{});
    case Elements::bfloat: return f(__nv_bfloat16{});
    default: return f(float{});
  }
}

// A warp's running softmax. high is the warp's, sums are the lane's.
template <int Heads>
struct Running {
  float high[Heads], sum[Heads], zero[Heads], o[Heads][8];  // zero: the values' zeros, summed; it adds to every element

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < Heads; ++h) {
      high[h] = -INFINITY, sum[h] = zero[h] = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) o[h][e] = 0;
    }
  }
  // s: scores of the lane's token, -inf if it has none. On return s holds the factors of the token's value codes.
  __device__ __forceinline__ void soften(float (&s)[Heads], const float2& code) {
    bool rises = false;
#pragma unroll
    for (int h = 0; h < Heads; ++h) rises |= s[h] > high[h];
    if (__any_sync(~0u, rises)) {
#pragma unroll
      for (int h = 0; h < Heads; ++h) {
        const float fresh = fmaxf(high[h], most_of_lanes(s[h]));
        const float shrink = high[h] == -INFINITY ? 0.f : exp2_fast(high[h] - fresh);
        high[h] = fresh, sum[h] *= shrink, zero[h] *= shrink;
#pragma unroll
        for (int e = 0; e < 8; ++e) o[h][e] *= shrink;
      }
    }
#pragma unroll
    for (int h = 0; h < Heads; ++h) {
      const float share = exp2_fast(s[h] - (high[h] == -INFINITY ? 0.f : high[h]));
      sum[h] += share, zero[h] = fmaf(share, code.y, zero[h]), s[h] = share * code.x;
    }
  }
};

}  // namespace kvlab::ops::decode_any
