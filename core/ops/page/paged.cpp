#include "ops/page/paged.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/half.hpp"
#include "ops/page/check.hpp"
#include "ops/page/codes.hpp"
#include "ops/page/row_kernels.hpp"
#include "ops/page/summary_codes.hpp"

namespace kvlab::ops {
namespace {

// Stores the scale and zero of numbers between lo and hi, and returns them as stored.
CodeScale put_scale(CodecSide side, float lo, float hi, std::byte* meta) {
  const CodeScale exact = code_scale(side, lo, hi);
  const std::uint16_t stored[] = {float_to_half(exact.scale), float_to_half(exact.zero)};
  std::memcpy(meta, stored, 4);
  return {half_to_float(stored[0]), half_to_float(stored[1])};
}

RowKind kind_of(CodecSide side) {
  if (side.kind == CodeKind::e4m3) return RowKind::e4m3;
  return side.bits == 8 ? RowKind::u8 : side.bits == 4 ? RowKind::u4 : RowKind::u2;
}

void encode_codes(const float* x, int dim, CodecSide side, std::byte* row, std::byte* meta) {
  const RowKernels& kernels = row_kernels();
  const int group = side.group ? side.group : dim;
  float scale[256], zero[256];
  for (int d = 0; d < dim; d += group, meta += 4) {
    float lo, hi;
    kernels.range(x + d, group, &lo, &hi);
    const CodeScale of = put_scale(side, lo, hi, meta);
    std::fill_n(scale + d, group == dim ? 1 : group, of.scale);
    std::fill_n(zero + d, group == dim ? 1 : group, of.zero);
  }
  kernels.encode(x, dim, kind_of(side), scale, zero, group != dim, reinterpret_cast<std::uint8_t*>(row));
}

// Stores one side of a full page whose tokens share scales. x: f32 [token, head_dim]
void encode_channels(const float* x, const PageLayout& l, bool key, std::byte* frame) {
  const CodecSide side = side_of(l, key);
  const int p = l.page_size, dim = l.head_dim, group = group_of(side, p, dim);
  const RowKernels& kernels = row_kernels();
  float lo[256], hi[256], scale[256], zero[256];
  for (int first = 0; first < p; first += group) {
    const float* rows = x + std::int64_t{first} * dim;
    kernels.ranges(rows, dim, group, dim, lo, hi);
    for (int d = 0; d < dim; ++d) {
      const CodeScale of = put_scale(side, lo[d], hi[d], frame + meta_offset(l, key, first, d));
      scale[d] = of.scale, zero[d] = of.zero;
    }
    for (int t = 0; t < group; ++t)
      kernels.encode(rows + std::int64_t{t} * dim, dim, kind_of(side), scale, zero, true,
                     reinterpret_cast<std::uint8_t*>(frame + row_offset(l, key, first + t)));
  }
}

void lower_codes(const std::byte* from, const std::byte* from_meta, CodecSide of, std::byte* to, std::byte* to_meta,
                 CodecSide side, int dim) {
  row_kernels().lower(reinterpret_cast<const std::uint8_t*>(from), dim * of.bits / 8, of.bits, side.bits,
                      reinterpret_cast<std::uint8_t*>(to));
  std::uint16_t meta[2];
  std::memcpy(meta, from_meta, 4);
  meta[0] = float_to_half(lowered_scale(half_to_float(meta[0]), code_ratio(of, side)));
  std::memcpy(to_meta, meta, 4);
}

void encode(const float* x, int dim, DType dtype, std::byte* row) {
  if (dtype == DType::f32) {
    std::memcpy(row, x, dim * sizeof(float));
  } else if (dtype == DType::f16) {
    auto* to = reinterpret_cast<std::uint16_t*>(row);
    for (int d = 0; d < dim; ++d) to[d] = float_to_half(x[d]);
  } else {
    row_kernels().to_bf16(x, dim, reinterpret_cast<std::uint16_t*>(row));
  }
}

void write_row(std::byte* frame, const PageLayout& l, bool key, int offset, const float* x) {
  std::byte* row = frame + row_offset(l, key, offset);
  if (const CodecSide side = side_of(l, key); side.bits && side.axis == CodeAxis::channel)
    fail(Errc::internal, "write_token", "got a token for a codec of axis channel, wanted a whole page");
  else if (side.bits)
    encode_codes(x, l.head_dim, side, row, frame + meta_offset(l, key, offset, 0));
  else
    encode(x, l.head_dim, l.dtype, row);
}

// Bits of the 16-bit value nearest to x that is not above it (limit < 0) or not below it (limit > 0).
std::uint16_t toward(float x, float limit, DType dtype) {
  const bool half = dtype == DType::f16;
  std::uint16_t bits = half ? float_to_half(x) : bf16(x).bits;
  bf16 b;
  b.bits = bits;
  const float y = half ? half_to_float(bits) : static_cast<float>(b);
  if ((limit < 0 && y > x) || (limit > 0 && y < x)) {
    const bool larger_magnitude = (limit > 0) == (x > 0);
    bits = static_cast<std::uint16_t>(larger_magnitude ? bits + 1 : bits - 1);
  }
  return bits;
}

// Draws a page's bounds in to the box of Summary::centre_radius.
void draw_in(const std::byte* frame, const PageLayout& l, int tokens, float* lo, float* hi) {
  float key[256], centre[256], radius[256] = {};
  for (int d = 0; d < l.head_dim; ++d) centre[d] = 0.5f * lo[d] + 0.5f * hi[d];
  for (int t = 0; t < tokens; ++t) {
    read_row(frame, l, KvSide::key, t, key);
    for (int d = 0; d < l.head_dim; ++d) radius[d] += std::abs(key[d] - centre[d]);
  }
  for (int d = 0; d < l.head_dim; ++d) {
    radius[d] /= static_cast<float>(tokens);
    lo[d] = std::max(lo[d], centre[d] - radius[d]);
    hi[d] = std::min(hi[d], centre[d] + radius[d]);
  }
}

}  // namespace

PageLayout make_layout(DType dtype, CodecSpec codec, int page_size, int head_dim, int state_columns) {
  row_kernels();  // a wrong KVLAB_ROWS is refused here: no thread of a parallel region may throw
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16)
    fail(Errc::unsupported, "make_layout",
         std::string("got a cache of ") + name_of(dtype) + ", wanted f32, bf16 or f16");
  for (const CodecSide side : {codec.k, codec.v}) {
    const std::string bits = std::to_string(side.bits);
    if (side.bits != 0 && side.bits != 2 && side.bits != 4 && side.bits != 8)
      fail(Errc::unsupported, "make_layout", "got a codec of " + bits + " bits, wanted 0, 2, 4 or 8");
    if (side.kind == CodeKind::e4m3 && side.bits != 8)
      fail(Errc::unsupported, "make_layout", "got e4m3 codes of " + bits + " bits, wanted 8");
    if (side.bits == 2 && head_dim % 16)
      fail(Errc::unsupported, "make_layout",
           "got head_dim " + std::to_string(head_dim) + " for codes of 2 bits, wanted a multiple of 16");
    const bool channel = side.axis == CodeAxis::channel;
    const int all = channel ? page_size : head_dim;
    if (side.bits && side.group && side.group < all && (all % side.group || (!channel && side.group < 8)))
      fail(Errc::unsupported, "make_layout",
           "got groups of " + std::to_string(side.group) + ", wanted " + (channel ? "" : "8 or more and ") +
               "a number that divides " + (channel ? "page_size " : "head_dim ") + std::to_string(all));
  }
  if (page_size < 1 || page_size > std::numeric_limits<std::uint16_t>::max())
    fail(Errc::unsupported, "make_layout", "got pages of " + std::to_string(page_size) + " tokens, wanted 1 to 65535");
  if (head_dim < 8 || head_dim > 256 || head_dim % 8)
    fail(Errc::unsupported, "make_layout",
         "got head_dim " + std::to_string(head_dim) + ", wanted a multiple of 8 up to 256");
  if (state_columns < 0)
    fail(Errc::internal, "make_layout", "got " + std::to_string(state_columns) + " state columns, wanted 0 or more");

  PageLayout l;
  for (CodecSide* side : {&codec.k, &codec.v})
    if (!side->bits)
      *side = {};
    else if (side->group >= (side->axis == CodeAxis::channel ? page_size : head_dim))
      side->group = 0;
  l.codec = codec;
  l.dtype = dtype;
  l.page_size = page_size;
  l.head_dim = head_dim;
  l.state_columns = state_columns;
  std::int64_t end = 0;
  const auto segment = [&](std::int64_t bytes) {
    const std::int64_t begin = end;
    end = (end + bytes + segment_bytes - 1) / segment_bytes * segment_bytes;
    return begin;
  };
  l.k = segment(page_size * row_bytes(l, true));
  l.v = segment(page_size * row_bytes(l, false));
  for (const bool key : {true, false}) {
    const CodecSide side = key ? codec.k : codec.v;
    (key ? l.k_meta : l.v_meta) =
        segment(side.bits ? std::int64_t{page_size} * head_dim / group_of(side, page_size, head_dim) * 4 : 0);
  }
  l.positions = segment(std::int64_t{page_size} * 4);
  l.state = segment(std::int64_t{page_size} * 4 * state_columns);
  l.bytes = (end + granule_bytes - 1) / granule_bytes * granule_bytes;
  return l;
}

namespace {

// Sets the text positions of a run of tokens, and zeroes their state.
void begin_tokens(std::byte* frame, const PageLayout& l, int offset, int count, std::int32_t position) {
  for (int t = 0; t < count; ++t) {
    const std::int32_t at = position + t;
    std::memcpy(frame + l.positions + std::int64_t{offset + t} * 4, &at, 4);
  }
  for (int c = 0; c < l.state_columns; ++c)
    std::memset(frame + l.state + (std::int64_t{c} * l.page_size + offset) * 4, 0, static_cast<std::size_t>(count) * 4);
}

}  // namespace

void write_tokens(std::byte* frame, const PageLayout& l, int offset, int count, const float* k, const float* v,
                  std::int64_t stride, std::int32_t position) {
  for (int t = 0; t < count; ++t) {
    write_row(frame, l, true, offset + t, k + t * stride);
    write_row(frame, l, false, offset + t, v + t * stride);
  }
  begin_tokens(frame, l, offset, count, position);
}

void write_tokens(std::byte* frame, const PageLayout& l, int offset, int count, const std::uint16_t* k,
                  const std::uint16_t* v, std::int32_t position) {
  if (l.dtype != DType::bf16 || l.codec.k.bits || l.codec.v.bits)
    fail(Errc::internal, "write_tokens",
         "got bits of bf16 for pages of codes or of another type, wanted pages of bf16");
  const auto bytes = static_cast<std::size_t>(count * row_bytes(l, true));
  std::memcpy(frame + row_offset(l, true, offset), k, bytes);
  std::memcpy(frame + row_offset(l, false, offset), v, bytes);
  begin_tokens(frame, l, offset, count, position);
}

void write_token(std::byte* frame, const PageLayout& l, int offset, const float* k, const float* v,
                 std::int32_t position) {
  write_tokens(frame, l, offset, 1, k, v, 0, position);
}

bool write_row(std::byte* frame, const PageLayout& l, KvSide side, int offset, const float* x) {
  const bool key = side == KvSide::key;
  const std::byte* row = frame + row_offset(l, key, offset);
  const std::vector<std::byte> before(row, row + row_bytes(l, key));
  write_row(frame, l, key, offset, x);
  return !std::equal(before.begin(), before.end(), row);
}

void read_row(const std::byte* frame, const PageLayout& l, KvSide side, int offset, float* out) {
  const bool key = side == KvSide::key;
  const std::byte* row = frame + row_offset(l, key, offset);
  if (const CodecSide of = side_of(l, key); of.grouped()) {
    for (int d = 0; d < l.head_dim; ++d) {
      std::uint16_t meta[2];
      std::memcpy(meta, frame + meta_offset(l, key, offset, d), 4);
      out[d] = value_of(of, code_at(of, row, d)) * half_to_float(meta[0]) + half_to_float(meta[1]);
    }
  } else if (of.bits) {
    std::uint16_t meta[2];
    std::memcpy(meta, frame + meta_offset(l, key, offset), 4);
    const float scale = half_to_float(meta[0]), zero = half_to_float(meta[1]);
    for (int d = 0; d < l.head_dim; ++d) out[d] = value_of(of, code_at(of, row, d)) * scale + zero;
  } else if (l.dtype == DType::f32) {
    std::memcpy(out, row, l.head_dim * sizeof(float));
  } else if (l.dtype == DType::f16) {
    const auto* from = reinterpret_cast<const std::uint16_t*>(row);
    for (int d = 0; d < l.head_dim; ++d) out[d] = half_to_float(from[d]);
  } else {
    const auto* from = reinterpret_cast<const bf16*>(row);
    for (int d = 0; d < l.head_dim; ++d) out[d] = static_cast<float>(from[d]);
  }
}

namespace {

void copy_side(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to, const PageLayout& lt,
               int offset_to, bool key) {
  const CodecSide of = side_of(lf, key), as = side_of(lt, key);
  if (of == as && of.axis == CodeAxis::token && (of.bits || lf.dtype == lt.dtype)) {
    std::memmove(to + row_offset(lt, key, offset_to), from + row_offset(lf, key, offset_from), row_bytes(lf, key));
    if (of.bits)
      std::memmove(to + meta_offset(lt, key, offset_to, 0), from + meta_offset(lf, key, offset_from, 0),
                   lf.head_dim / group_of(of, lf.page_size, lf.head_dim) * 4);
  } else if (code_ratio(of, as) > 0) {
    lower_codes(from + row_offset(lf, key, offset_from), from + meta_offset(lf, key, offset_from), of,
                to + row_offset(lt, key, offset_to), to + meta_offset(lt, key, offset_to), as, lf.head_dim);
  } else {
    float x[256];
    read_row(from, lf, key ? KvSide::key : KvSide::value, offset_from, x);
    write_row(to, lt, key, offset_to, x);
  }
}

void copy_rest(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to, const PageLayout& lt,
               int offset_to) {
  std::memmove(to + lt.positions + std::int64_t{offset_to} * 4, from + lf.positions + std::int64_t{offset_from} * 4, 4);
  for (int c = 0; c < lf.state_columns; ++c)
    std::memmove(to + lt.state + (std::int64_t{c} * lt.page_size + offset_to) * 4,
                 from + lf.state + (std::int64_t{c} * lf.page_size + offset_from) * 4, 4);
}

}  // namespace

void copy_token(const std::byte* from, const PageLayout& lf, int offset_from, std::byte* to, const PageLayout& lt,
                int offset_to) {
  if (lf.head_dim != lt.head_dim || lf.state_columns != lt.state_columns)
    fail(Errc::internal, "copy_token", "got layouts of different head_dim or state columns, wanted equal ones");
  for (const bool key : {true, false}) copy_side(from, lf, offset_from, to, lt, offset_to, key);
  copy_rest(from, lf, offset_from, to, lt, offset_to);
}

void copy_page(const std::byte* from, const PageLayout& lf, std::byte* to, const PageLayout& lt) {
  const int p = lt.page_size;
  for (const bool key : {true, false}) {
    const CodecSide as = side_of(lt, key);
    if (!as.bits || as.axis == CodeAxis::token) {
      for (int t = 0; t < p; ++t) copy_side(from, lf, t, to, lt, t, key);
      continue;
    }
    std::vector<float> x(static_cast<std::size_t>(p) * lt.head_dim);
    for (int t = 0; t < p; ++t)
      read_row(from, lf, key ? KvSide::key : KvSide::value, t, x.data() + std::int64_t{t} * lt.head_dim);
    encode_channels(x.data(), lt, key, to);
  }
  for (int t = 0; t < p; ++t) copy_rest(from, lf, t, to, lt, t);
}

namespace {

// What a number of a summary in codes counts as (summary_bytes).
float within_codes(float x) { return std::min(std::max(x, -summary_limit), summary_limit); }

// Writes the codes of a page's summary: of lo and hi [dim], or where hi is null of means lo.
void encode_summary(const float* lo, const float* hi, int dim, std::byte* out) {
  float least = summary_limit, most = -summary_limit;
  for (const float* side : {lo, hi})
    for (int d = 0; side && d < dim; ++d) {
      if (std::isnan(side[d])) continue;
      least = std::min(least, within_codes(side[d]));
      most = std::max(most, within_codes(side[d]));
    }
  const float zero = least + 0.f;  // no -0: which of two zeros came first does not matter
  const float scale = std::max((most - least) * summary_step, least_summary_scale), inverse = 1 / scale;
  const auto number = [&](int code) { return static_cast<float>(code) * scale + zero; };
  const auto place = [&](float x) { return std::min(std::max((x - zero) * inverse, 0.f), 255.f); };
  for (int d = 0; d < dim; ++d) {
    const float low = within_codes(lo[d]);
    if (!hi) {
      out[d] = static_cast<std::byte>(std::isnan(low) ? 0 : static_cast<int>(std::nearbyint(place(low))));
      continue;
    }
    const float high = within_codes(hi[d]);
    int below = 0, above = 255;
    if (!std::isnan(low)) {
      below = static_cast<int>(place(low));
      if (below > 0 && number(below) > low) --below;
      if (below < 255 && number(below + 1) <= low) ++below;
    }
    if (!std::isnan(high)) {
      above = static_cast<int>(std::ceil(place(high)));
      if (above < 255 && number(above) < high) ++above;
      if (above > 0 && number(above - 1) >= high) --above;
    }
    out[d] = static_cast<std::byte>(below), out[dim + d] = static_cast<std::byte>(above);
  }
  const int numbers = hi ? 2 * dim : dim;
  const float shared[] = {scale, zero, 0, 0};  // the zeros fill up to 16 bytes
  std::memcpy(out + numbers, shared, numbers % 16 ? 8 : 16);
}

}  // namespace

void summarize_page(const std::byte* frame, const PageLayout& l, int tokens, Summary kind, DType dtype, std::byte* out,
                    int bits) {
  if (kind == Summary::none) return;
  if (tokens < 1 || tokens > l.page_size)
    fail(Errc::internal, "summarize_page",
         "got " + std::to_string(tokens) + " tokens, wanted 1 to " + std::to_string(l.page_size));
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16)
    fail(Errc::unsupported, "summarize_page",
         std::string("got summaries of ") + name_of(dtype) + ", wanted f32, bf16 or f16");
  const int dim = l.head_dim;
  float key[256], lo[256], hi[256], total[256];
  for (int t = 0; t < tokens; ++t) {
    read_row(frame, l, KvSide::key, t, key);
    for (int d = 0; d < dim; ++d) {
      lo[d] = t ? std::min(lo[d], key[d]) : key[d];
      hi[d] = t ? std::max(hi[d], key[d]) : key[d];
      total[d] = t ? total[d] + key[d] : key[d];
    }
  }
  if (kind == Summary::centre_radius) draw_in(frame, l, tokens, lo, hi);
  if (kind == Summary::mean)
    for (int d = 0; d < dim; ++d) total[d] /= static_cast<float>(tokens);
  if (bits == 8) {
    kind == Summary::mean ? encode_summary(total, nullptr, dim, out) : encode_summary(lo, hi, dim, out);
  } else if (kind == Summary::mean) {
    encode(total, dim, dtype, out);
  } else if (dtype == DType::f32) {
    encode(lo, dim, dtype, out);
    encode(hi, dim, dtype, out + dim * sizeof(float));
  } else {
    auto* to = reinterpret_cast<std::uint16_t*>(out);
    for (int d = 0; d < dim; ++d) {
      to[d] = toward(lo[d], -1, dtype);
      to[dim + d] = toward(hi[d], 1, dtype);
    }
  }
}

void token_positions(const PagedKv& kv, int row, int head, int tokens, std::int32_t* positions) {
  for (int t = 0; t < tokens; t += kv.page_size) {
    const int page = t / kv.page_size;
    constexpr int ahead = 12;  // pages to prefetch ahead: frames are scattered, and each gives one cache line
    if (page + ahead < kv.pages(row, head)) {
      const PageEntry& next = kv.entry(row, head, page + ahead);
      if (next.frame >= 0) __builtin_prefetch(kv.frame(next) + kv.layout(next).positions);
    }
    check_page(kv, row, head, page, "token_positions");
    const PageEntry& e = kv.entry(row, head, page);
    std::memcpy(positions + t, kv.frame(e) + kv.layout(e).positions,
                std::min(kv.page_size, tokens - t) * sizeof(std::int32_t));
  }
}

void token_ranks(const PagedKv& kv, int row, int head, int tokens, std::int32_t* rank) {
  thread_local std::vector<std::int32_t> position, runs, order;
  position.resize(tokens);
  token_positions(kv, row, head, tokens, position.data());
  runs.clear();  // first place of every ascending run
  for (int t = 0; t < tokens; ++t)
    if (t == 0 || position[t] <= position[t - 1]) runs.push_back(t);
  if (runs.size() <= 1) {
    for (int t = 0; t < tokens; ++t) rank[t] = t;
    return;
  }
  order.resize(tokens);
  for (int t = 0; t < tokens; ++t) order[t] = t;
  const auto older = [](std::int32_t a, std::int32_t b) { return position[a] < position[b]; };
  // Evictions that fill holes with the newest tokens leave a few runs, and merging two costs a pass.
  if (runs.size() <= 4)
    for (std::size_t i = 1; i < runs.size(); ++i)
      std::inplace_merge(order.begin(), order.begin() + runs[i],
                         i + 1 < runs.size() ? order.begin() + runs[i + 1] : order.end(), older);
  else
    std::sort(order.begin(), order.end(), older);
  for (int i = 0; i < tokens; ++i) {
    const bool equal = i > 0 && position[order[i]] == position[order[i - 1]];
    rank[order[i]] = equal ? rank[order[i - 1]] : i;
  }
}

void gather_rows(const PagedKv& kv, int row, int head, KvSide side, int tokens, float* out) {
  const bool turn = kv.rope == RopeRegime::cache_relative && side == KvSide::key;
  std::vector<std::int32_t> rank(turn ? tokens : 0);
  if (turn) token_ranks(kv, row, head, tokens, rank.data());
  for (int t = 0; t < tokens; ++t) {
    const int page = t / kv.page_size;
    if (t % kv.page_size == 0) check_page(kv, row, head, page, "gather_rows");
    const PageEntry& e = kv.entry(row, head, page);
    float* x = out + std::int64_t{t} * kv.head_dim;
    read_row(kv.frame(e), kv.layout(e), side, t % kv.page_size, x);
    if (turn) rotate(x, kv.rope_table, rank[t]);
  }
}

void rope_angles(const RopeTable& rope, double position, float* cosine, float* sine) {
  for (int i = 0; i < rope.head_dim / 2; ++i) {
    const double angle = position * static_cast<double>(rope.inv_freq[i]);
    cosine[i] = static_cast<float>(std::cos(angle) * rope.attention_scale);
    sine[i] = static_cast<float>(std::sin(angle) * rope.attention_scale);
  }
}

void rotate_with(float* x, const float* cosine, const float* sine, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

void rotate(float* x, const RopeTable& rope, double position) {
  if (rope.head_dim > 256) fail(Errc::unsupported, "rotate", "got head_dim above 256, wanted at most 256");
  float cosine[128], sine[128];
  rope_angles(rope, position, cosine, sine);
  rotate_with(x, cosine, sine, rope.head_dim);
}

void re_rotate(const PagedKv& kv, int row, int head, int tokens, const std::int32_t* delta) {
  RopeTable turn = kv.rope_table;
  turn.attention_scale = 1;  // cached keys already carry it
  float key[256];
  for (int t = 0; t < tokens; ++t) {
    const int page = t / kv.page_size;
    if (t % kv.page_size == 0) check_page(kv, row, head, page, "re_rotate");
    if (delta[t] == 0) continue;
    const PageEntry& e = kv.entry(row, head, page);
    read_row(kv.frame(e), kv.layout(e), KvSide::key, t % kv.page_size, key);
    rotate(key, turn, delta[t]);
    write_row(kv.frame(e), kv.layout(e), true, t % kv.page_size, key);
  }
}

}  // namespace kvlab::ops
