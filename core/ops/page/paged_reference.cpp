#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/half.hpp"
#include "ops/page/check.hpp"
#include "ops/page/reference.hpp"

namespace kvlab::ops {
namespace {

template <class T>
T load(const std::byte* from, std::int64_t index) {
  T x;
  std::memcpy(&x, from + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return x;
}

template <class T>
void put(std::byte* to, std::int64_t index, T x) {
  std::memcpy(to + index * static_cast<std::int64_t>(sizeof(T)), &x, sizeof(T));
}

int bits_of(const PageLayout& l, KvSide side) { return side == KvSide::key ? l.codec.k.bits : l.codec.v.bits; }

void write_side(std::byte* frame, const PageLayout& l, KvSide side, int offset, const float* x) {
  std::byte* data = frame + (side == KvSide::key ? l.k : l.v);
  std::byte* meta = frame + (side == KvSide::key ? l.k_meta : l.v_meta);
  const std::int64_t first = std::int64_t{offset} * l.head_dim;
  float scale = 0, zero = 0;
  if (bits_of(l, side)) {
    const float lo = *std::min_element(x, x + l.head_dim), hi = *std::max_element(x, x + l.head_dim);
    const std::uint16_t stored[] = {float_to_half(std::min((hi - lo) / 255.f, 65504.f)),
                                    float_to_half(std::clamp(lo, -65504.f, 65504.f))};
    put(meta, 2 * std::int64_t{offset}, stored[0]);
    put(meta, 2 * std::int64_t{offset} + 1, stored[1]);
    scale = half_to_float(stored[0]);
    zero = half_to_float(stored[1]);
  }
  for (int d = 0; d < l.head_dim; ++d)
    if (bits_of(l, side)) {
      const float code = scale > 0 ? std::nearbyint(std::clamp((x[d] - zero) / scale, 0.f, 255.f)) : 0.f;
      put(data, first + d, static_cast<std::uint8_t>(code));
    } else if (l.dtype == DType::f32) {
      put(data, first + d, x[d]);
    } else if (l.dtype == DType::f16) {
      put(data, first + d, float_to_half(x[d]));
    } else {
      put(data, first + d, bf16(x[d]));
    }
}

// The shift truncates; the neighbour away from zero has the next larger bits.
bf16 bound(double x, bool upper) {
  const auto exact = static_cast<float>(x);
  bf16 b;
  b.bits = static_cast<std::uint16_t>(load<std::uint32_t>(reinterpret_cast<const std::byte*>(&exact), 0) >> 16);
  if (static_cast<float>(b) != exact && (exact > 0) == upper) ++b.bits;
  return b;
}

void put_element(std::byte* to, DType dtype, std::int64_t index, double x) {
  if (dtype == DType::f32)
    put(to, index, static_cast<float>(x));
  else
    put(to, index, bf16(static_cast<float>(x)));
}

struct Stored {
  std::byte* frame;
  const PageLayout* layout;
  int offset;
};

Stored stored(const PagedKv& kv, int row, int head, int token, const char* op) {
  check_page(kv, row, head, token / kv.page_size, op);
  const PageEntry& e = kv.entry(row, head, token / kv.page_size);
  return {kv.frame(e), &kv.layout(e), token % kv.page_size};
}

}  // namespace

void write_token_reference(std::byte* frame, const PageLayout& l, int offset, const float* k, const float* v,
                           std::int32_t position) {
  write_side(frame, l, KvSide::key, offset, k);
  write_side(frame, l, KvSide::value, offset, v);
  put(frame + l.positions, offset, position);
  for (int c = 0; c < l.state_columns; ++c) put(frame + l.state, std::int64_t{c} * l.page_size + offset, 0.f);
}

void read_row_reference(const std::byte* frame, const PageLayout& l, KvSide side, int offset, float* out) {
  const std::byte* data = frame + (side == KvSide::key ? l.k : l.v);
  const std::byte* meta = frame + (side == KvSide::key ? l.k_meta : l.v_meta);
  for (int d = 0; d < l.head_dim; ++d) {
    const std::int64_t at = std::int64_t{offset} * l.head_dim + d;
    if (bits_of(l, side)) {
      const double scale = half_to_float(load<std::uint16_t>(meta, 2 * std::int64_t{offset}));
      const double zero = half_to_float(load<std::uint16_t>(meta, 2 * std::int64_t{offset} + 1));
      out[d] = static_cast<float>(load<std::uint8_t>(data, at) * scale + zero);
    } else {
      out[d] = l.dtype == DType::f32   ? load<float>(data, at)
               : l.dtype == DType::f16 ? half_to_float(load<std::uint16_t>(data, at))
                                       : static_cast<float>(load<bf16>(data, at));
    }
  }
}

void copy_token_reference(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to,
                          const PageLayout& lt, int offset_to) {
  for (const KvSide side : {KvSide::key, KvSide::value}) {
    std::vector<float> x(lf.head_dim);
    read_row_reference(from, lf, side, offset_from, x.data());
    write_side(to, lt, side, offset_to, x.data());
    if (!bits_of(lf, side) || !bits_of(lt, side)) continue;
    const bool key = side == KvSide::key;  // equal codecs: the codes are copied unchanged
    std::memcpy(to + (key ? lt.k : lt.v) + std::int64_t{offset_to} * lt.head_dim,
                from + (key ? lf.k : lf.v) + std::int64_t{offset_from} * lf.head_dim, lf.head_dim);
    std::memcpy(to + (key ? lt.k_meta : lt.v_meta) + std::int64_t{offset_to} * 4,
                from + (key ? lf.k_meta : lf.v_meta) + std::int64_t{offset_from} * 4, 4);
  }
  put(to + lt.positions, offset_to, load<std::int32_t>(from + lf.positions, offset_from));
  for (int c = 0; c < lf.state_columns; ++c)
    put(to + lt.state, std::int64_t{c} * lt.page_size + offset_to,
        load<float>(from + lf.state, std::int64_t{c} * lf.page_size + offset_from));
}

void summarize_page_reference(const std::byte* frame, const PageLayout& l, int tokens, Summary kind, DType dtype,
                              std::byte* out) {
  if (kind == Summary::none) return;
  std::vector<std::vector<float>> keys(tokens, std::vector<float>(l.head_dim));
  for (int t = 0; t < tokens; ++t) read_row_reference(frame, l, KvSide::key, t, keys[t].data());
  for (int d = 0; d < l.head_dim; ++d) {
    double lo = keys[0][d], hi = lo, sum = 0;
    for (int t = 0; t < tokens; ++t) {
      lo = std::min<double>(lo, keys[t][d]);
      hi = std::max<double>(hi, keys[t][d]);
      sum += keys[t][d];
    }
    if (kind == Summary::centre_radius) {
      const double centre = (lo + hi) / 2;
      double distances = 0;
      for (int t = 0; t < tokens; ++t) distances += std::abs(keys[t][d] - centre);
      lo = centre - distances / tokens;
      hi = centre + distances / tokens;
    }
    if (kind == Summary::mean) {
      put_element(out, dtype, d, sum / tokens);
    } else if (dtype == DType::f32) {
      put_element(out, dtype, d, lo);
      put_element(out, dtype, l.head_dim + d, hi);
    } else {
      put(out, d, bound(lo, false));
      put(out, l.head_dim + d, bound(hi, true));
    }
  }
}

void token_positions_reference(const PagedKv& kv, int row, int head, int tokens, std::int32_t* positions) {
  for (int t = 0; t < tokens; ++t) {
    const Stored s = stored(kv, row, head, t, "token_positions_reference");
    positions[t] = load<std::int32_t>(s.frame + s.layout->positions, s.offset);
  }
}

void token_ranks_reference(const PagedKv& kv, int row, int head, int tokens, std::int32_t* rank) {
  std::vector<std::int32_t> position(tokens);
  token_positions_reference(kv, row, head, tokens, position.data());
  for (int t = 0; t < tokens; ++t)
    rank[t] = static_cast<std::int32_t>(
        std::count_if(position.begin(), position.end(), [&](std::int32_t p) { return p < position[t]; }));
}

void gather_rows_reference(const PagedKv& kv, int row, int head, KvSide side, int tokens, float* out) {
  std::vector<std::int32_t> rank(tokens);
  const bool turn = kv.rope == RopeRegime::cache_relative && side == KvSide::key;
  if (turn) token_ranks_reference(kv, row, head, tokens, rank.data());
  for (int t = 0; t < tokens; ++t) {
    const Stored s = stored(kv, row, head, t, "gather_rows_reference");
    float* x = out + std::int64_t{t} * kv.head_dim;
    read_row_reference(s.frame, *s.layout, side, s.offset, x);
    if (turn) rotate_reference(x, kv.rope_table, rank[t]);
  }
}

void rotate_reference(float* x, const RopeTable& rope, double position) {
  const int half = rope.head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = position * double{rope.inv_freq[i]}, a = x[i], b = x[half + i];
    x[i] = static_cast<float>((a * std::cos(angle) - b * std::sin(angle)) * rope.attention_scale);
    x[half + i] = static_cast<float>((b * std::cos(angle) + a * std::sin(angle)) * rope.attention_scale);
  }
}

void re_rotate_reference(const PagedKv& kv, int row, int head, int tokens, const std::int32_t* delta) {
  const RopeTable turn{kv.rope_table.inv_freq, kv.head_dim, 1.f};
  std::vector<float> key(kv.head_dim);
  for (int t = 0; t < tokens; ++t) {
    if (delta[t] == 0) continue;
    const Stored s = stored(kv, row, head, t, "re_rotate_reference");
    read_row_reference(s.frame, *s.layout, KvSide::key, s.offset, key.data());
    rotate_reference(key.data(), turn, delta[t]);
    write_side(s.frame, *s.layout, KvSide::key, s.offset, key.data());
  }
}

}  // namespace kvlab::ops
