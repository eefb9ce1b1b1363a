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

CodecSide side_of(const PageLayout& l, KvSide side) { return side == KvSide::key ? l.codec.k : l.codec.v; }

// The numbers of e4m3 that are not negative, by their codes.
std::vector<double> e4m3_numbers() {
  std::vector<double> x;
  for (int code = 0; code < 127; ++code)
    x.push_back(code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10));
  return x;
}

double code_value(CodecSide side, int code) {
  if (side.kind != CodeKind::e4m3) return code;
  if (code % 128 == 127) return NAN;
  static const std::vector<double> number = e4m3_numbers();
  return code < 128 ? number[code] : -number[code - 128];
}

int nearest_code(CodecSide side, float x, float scale, float zero) {
  if (side.kind != CodeKind::e4m3) {
    if (scale == 0 || std::isnan(x)) return 0;
    return static_cast<int>(std::nearbyint(std::clamp((x - zero) / scale, 0.f, std::ldexp(1.f, side.bits) - 1)));
  }
  if (std::isnan(x)) return 127;
  if (scale == 0) return 0;
  const double size = std::min<double>(std::abs(x / scale), 448);
  int best = 0;
  for (int code = 1; code < 127; ++code) {
    const double now = std::abs(code_value(side, best) - size), then = std::abs(code_value(side, code) - size);
    if (then < now || (then == now && code % 2 == 0)) best = code;
  }
  return std::signbit(x) ? best + 128 : best;
}

// The bits of element d are those from d * bits on.
int stored_code(const std::byte* row, int bits, int d) {
  int code = 0;
  for (int i = 0; i < bits; ++i) {
    const int at = d * bits + i;
    if (static_cast<int>(row[at / 8]) & 1 << at % 8) code |= 1 << i;
  }
  return code;
}
void store_code(std::byte* row, int bits, int d, int code) {
  for (int i = 0; i < bits; ++i) {
    const int at = d * bits + i;
    row[at / 8] &= ~(std::byte{1} << at % 8);
    if (code & 1 << i) row[at / 8] |= std::byte{1} << at % 8;
  }
}

void write_codes(std::byte* row, std::byte* meta, CodecSide side, int head_dim, const float* x) {
  std::vector<float> numbers;
  for (int d = 0; d < head_dim; ++d)
    if (!std::isnan(x[d])) numbers.push_back(x[d]);
  float scale = 0, zero = 0;
  if (!numbers.empty()) {
    const float lo = *std::min_element(numbers.begin(), numbers.end()),
                hi = *std::max_element(numbers.begin(), numbers.end());
    if (side.kind == CodeKind::e4m3) {
      scale = std::max(std::abs(lo), std::abs(hi)) / 448;
    } else if (side.kind == CodeKind::whole_zero) {
      const float most = std::ldexp(1.f, side.bits) - 1;
      scale = std::min(std::max(hi - lo, 1e-5f) / most, 65504.f);
      zero = std::max(0 - scale * std::nearbyint(std::clamp(-lo / scale, 0.f, most)), -65504.f);
    } else {
      scale = lo == hi ? 0 : (hi - lo) / (std::ldexp(1.f, side.bits) - 1);
      zero = lo == 0 ? 0 : std::clamp(lo, -65504.f, 65504.f);
    }
  }
  const std::uint16_t stored[] = {float_to_half(std::min(scale, 65504.f)), float_to_half(zero)};
  std::memcpy(meta, stored, 4);
  for (int d = 0; d < head_dim; ++d)
    store_code(row, side.bits, d, nearest_code(side, x[d], half_to_float(stored[0]), half_to_float(stored[1])));
}

void write_side(std::byte* frame, const PageLayout& l, KvSide side, int offset, const float* x) {
  std::byte* data = frame + (side == KvSide::key ? l.k : l.v);
  std::byte* meta = frame + (side == KvSide::key ? l.k_meta : l.v_meta);
  const std::int64_t first = std::int64_t{offset} * l.head_dim;
  if (const CodecSide of = side_of(l, side); of.bits) {
    const int group = of.group ? of.group : l.head_dim, groups = l.head_dim / group;
    for (int g = 0; g < groups; ++g)
      write_codes(data + (first + std::int64_t{g} * group) * of.bits / 8,
                  meta + (std::int64_t{offset} * groups + g) * 4, of, group, x + std::int64_t{g} * group);
    return;
  }
  for (int d = 0; d < l.head_dim; ++d)
    if (l.dtype == DType::f32) {
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
  const std::int64_t first = std::int64_t{offset} * l.head_dim;
  const CodecSide of = side_of(l, side);
  const bool channel = of.axis == CodeAxis::channel;
  const int group = of.group ? of.group : channel ? l.page_size : l.head_dim;
  const std::byte* row = data + first * of.bits / 8;
  std::int64_t known = -1;  // the group of scale and zero
  float scale = 0, zero = 0;
  for (int d = 0; d < l.head_dim; ++d) {
    if (!of.bits) {
      out[d] = l.dtype == DType::f32   ? load<float>(data, first + d)
               : l.dtype == DType::f16 ? half_to_float(load<std::uint16_t>(data, first + d))
                                       : static_cast<float>(load<bf16>(data, first + d));
      continue;
    }
    const std::int64_t number = channel ? std::int64_t{offset / group} * l.head_dim + d : (first + d) / group;
    if (number != known) {
      scale = half_to_float(load<std::uint16_t>(meta, 2 * number));
      zero = half_to_float(load<std::uint16_t>(meta, 2 * number + 1));
      known = number;
    }
    out[d] = static_cast<float>(code_value(of, stored_code(row, of.bits, d))) * scale + zero;
  }
}

// From codes to codes of fewer bits: the nearest code, the scale times as much, the same zero.
static void lower_side(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to,
                       const PageLayout& lt, int offset_to, KvSide side) {
  const bool key = side == KvSide::key;
  const int bits = side_of(lf, side).bits, fewer = side_of(lt, side).bits;
  const double ratio = static_cast<double>((1 << bits) - 1) / ((1 << fewer) - 1);
  const std::byte* codes = from + (key ? lf.k : lf.v) + std::int64_t{offset_from} * lf.head_dim * bits / 8;
  std::byte* lowered = to + (key ? lt.k : lt.v) + std::int64_t{offset_to} * lt.head_dim * fewer / 8;
  for (int d = 0; d < lf.head_dim; ++d) {
    const int code = static_cast<int>(codes[d * bits / 8]) >> (d * bits % 8) & ((1 << bits) - 1);
    const int own = static_cast<int>(std::lround(code / ratio)), byte = d * fewer / 8, shift = d * fewer % 8;
    const int others = static_cast<int>(lowered[byte]) & ~(((1 << fewer) - 1) << shift);
    lowered[byte] = static_cast<std::byte>(others | own << shift);
  }
  const std::byte* meta = from + (key ? lf.k_meta : lf.v_meta);
  std::byte* out = to + (key ? lt.k_meta : lt.v_meta);
  const double scale = half_to_float(load<std::uint16_t>(meta, 2 * std::int64_t{offset_from})) * ratio;
  put(out, 2 * std::int64_t{offset_to}, float_to_half(static_cast<float>(std::min(scale, 65504.))));
  put(out, 2 * std::int64_t{offset_to} + 1, load<std::uint16_t>(meta, 2 * std::int64_t{offset_from} + 1));
}

void copy_token_reference(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to,
                          const PageLayout& lt, int offset_to) {
  for (const KvSide side : {KvSide::key, KvSide::value}) {
    const CodecSide of = side_of(lf, side);
    const bool key = side == KvSide::key;
    std::vector<float> x(lf.head_dim);
    read_row_reference(from, lf, side, offset_from, x.data());
    const CodecSide as = side_of(lt, side);
    if (of.group == 0 && as.group == 0 && of.bits > as.bits && as.bits > 0 && of.kind == CodeKind::integer &&
        as.kind == CodeKind::integer) {
      lower_side(from, lf, offset_from, to, lt, offset_to, side);
      continue;
    }
    write_side(to, lt, side, offset_to, x.data());
    if (!of.bits || of != side_of(lt, side)) continue;  // equal codecs: the codes are copied unchanged
    const int row = lf.head_dim * of.bits / 8, scales = of.group ? lf.head_dim / of.group : 1;
    std::memcpy(to + (key ? lt.k : lt.v) + std::int64_t{offset_to} * row,
                from + (key ? lf.k : lf.v) + std::int64_t{offset_from} * row, row);
    std::memcpy(to + (key ? lt.k_meta : lt.v_meta) + std::int64_t{offset_to} * scales * 4,
                from + (key ? lf.k_meta : lf.v_meta) + std::int64_t{offset_from} * scales * 4, std::size_t(scales) * 4);
  }
  put(to + lt.positions, offset_to, load<std::int32_t>(from + lf.positions, offset_from));
  for (int c = 0; c < lf.state_columns; ++c)
    put(to + lt.state, std::int64_t{c} * lt.page_size + offset_to,
        load<float>(from + lf.state, std::int64_t{c} * lf.page_size + offset_from));
}

// Of pages without codes. Each group is written as if it were a row, and its codes go to their places.
void copy_page_reference(const std::byte* from, const PageLayout& lf, std::byte* to, const PageLayout& lt) {
  const int p = lt.page_size, dim = lt.head_dim;
  for (const KvSide side : {KvSide::key, KvSide::value}) {
    const bool key = side == KvSide::key;
    const CodecSide as = side_of(lt, side);
    std::vector<float> x(std::size_t(p) * dim);
    for (int t = 0; t < p; ++t) read_row_reference(from, lf, side, t, x.data() + std::int64_t{t} * dim);
    if (as.axis == CodeAxis::token) {
      for (int t = 0; t < p; ++t) write_side(to, lt, side, t, x.data() + std::int64_t{t} * dim);
      continue;
    }
    const int group = as.group ? as.group : p;
    for (int g = 0; g < p / group; ++g)
      for (int d = 0; d < dim; ++d) {
        std::vector<float> column;
        for (int t = g * group; t < (g + 1) * group; ++t) column.push_back(x[std::int64_t{t} * dim + d]);
        std::vector<std::byte> row(static_cast<std::size_t>(group));
        write_codes(row.data(), to + (key ? lt.k_meta : lt.v_meta) + (std::int64_t{g} * dim + d) * 4, as, group,
                    column.data());
        for (int t = 0; t < group; ++t)
          store_code(to + (key ? lt.k : lt.v) + (std::int64_t{g} * group + t) * dim * as.bits / 8, as.bits, d,
                     stored_code(row.data(), as.bits, t));
      }
  }
  for (int t = 0; t < p; ++t) {
    put(to + lt.positions, t, load<std::int32_t>(from + lf.positions, t));
    for (int c = 0; c < lf.state_columns; ++c)
      put(to + lt.state, std::int64_t{c} * p + t, load<float>(from + lf.state, std::int64_t{c} * p + t));
  }
}

namespace {

// Looks for each code among all of them. sides: [2 or 1, head_dim], of a box or of means.
void encode_summary_reference(const std::vector<std::vector<double>>& sides, std::byte* out) {
  const double limit = std::ldexp(1., 100);
  double least = limit, most = -limit;
  std::vector<std::vector<float>> within(sides.size());
  for (std::size_t s = 0; s < sides.size(); ++s)
    for (double x : sides[s]) {
      if (!std::isnan(x)) x = std::clamp(x, -limit, limit), least = std::min(least, x), most = std::max(most, x);
      within[s].push_back(static_cast<float>(x));
    }
  const float zero = static_cast<float>(least) == 0 ? 0.f : static_cast<float>(least);
  float scale = (static_cast<float>(most) - zero) * 0x1.010108p-8f;
  if (!(scale > 0x1p-126f)) scale = 0x1p-126f;
  float number[256];
  for (int c = 0; c < 256; ++c) number[c] = static_cast<float>(c) * scale + zero;
  std::byte* to = out;
  for (std::size_t s = 0; s < sides.size(); ++s)
    for (const float x : within[s]) {
      const bool high = s == 1;
      int code = high ? 255 : 0;
      if (sides.size() == 1 && !std::isnan(x))
        code = static_cast<int>(std::clamp(std::nearbyint((double{x} - double{zero}) / double{scale}), 0., 255.));
      else if (!std::isnan(x))
        for (int c = 0; c < 256; ++c) {
          if (!high && number[c] <= x) code = c;
          if (high && number[255 - c] >= x) code = 255 - c;
        }
      *to++ = static_cast<std::byte>(code);
    }
  const std::size_t numbers = static_cast<std::size_t>(to - out);
  std::memset(to, 0, (numbers + 8 + 15) / 16 * 16 - numbers);
  std::memcpy(to, &scale, 4);
  std::memcpy(to + 4, &zero, 4);
}

}  // namespace

void summarize_page_reference(const std::byte* frame, const PageLayout& l, int tokens, Summary kind, DType dtype,
                              std::byte* out, int bits) {
  if (kind == Summary::none) return;
  std::vector<std::vector<float>> keys(tokens, std::vector<float>(l.head_dim));
  for (int t = 0; t < tokens; ++t) read_row_reference(frame, l, KvSide::key, t, keys[t].data());
  std::vector<std::vector<double>> sides(kind == Summary::mean ? 1 : 2);
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
    if (bits == 8) {
      sides[0].push_back(kind == Summary::mean ? sum / tokens : lo);
      if (kind != Summary::mean) sides[1].push_back(hi);
    } else if (kind == Summary::mean) {
      put_element(out, dtype, d, sum / tokens);
    } else if (dtype == DType::f32) {
      put_element(out, dtype, d, lo);
      put_element(out, dtype, l.head_dim + d, hi);
    } else {
      put(out, d, bound(lo, false));
      put(out, l.head_dim + d, bound(hi, true));
    }
  }
  if (bits == 8) encode_summary_reference(sides, out);
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
