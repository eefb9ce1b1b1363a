#include "ops/token_rows.hpp"

#include <algorithm>
#include <cstring>

#include "base/half.hpp"
#include "ops/check.hpp"
#include "ops/paged.hpp"

namespace kvlab::ops {

void TokenRows::gather(const PagedKv& kv, int row, int head, KvSide side, const std::int32_t* list, int first,
                       int count) {
  const int tokens = kv.tokens(row, head);
  const std::size_t room = padded(count * kv.page_size);
  if (row_.size() < room) {
    row_.resize(room);
    scale_.resize(room);
    zero_.resize(room);
    place_.resize(room);
    position_.resize(room);
  }
  int n = 0;
  RowKind kind = RowKind::f32;
  bool mixed = false;
  kind_.clear();
  for (int i = 0; i < count; ++i) {
    const int page = list ? list[i] : first + i;
    const PageEntry& e = kv.entry(row, head, page);
    const PageLayout& l = kv.layout(e);
    const std::byte* frame = kv.frame(e);
    const int in_page = std::min(kv.page_size, tokens - page * kv.page_size);
    const bool key = side == KvSide::key;
    const int bits = key ? l.codec.k.bits : l.codec.v.bits;
    const RowKind page_kind = bits ? RowKind::u8 : l.dtype == DType::f32 ? RowKind::f32 : RowKind::bf16;
    mixed |= n > 0 && page_kind != kind;
    kind = page_kind;
    const std::int64_t bytes = l.head_dim * (bits ? 1 : static_cast<std::int64_t>(size_of(l.dtype)));
    const std::byte* data = frame + (key ? l.k : l.v);
    const std::byte* meta = frame + (key ? l.k_meta : l.v_meta);
    std::memcpy(position_.data() + n, frame + l.positions, in_page * sizeof(std::int32_t));
    for (int t = 0; t < in_page; ++t, ++n) {
      row_[n] = data + t * bytes;
      place_[n] = page * kv.page_size + t;
      if (bits) {
        std::uint16_t m[2];
        std::memcpy(m, meta + t * 4, 4);
        scale_[n] = half_to_float(m[0]);
        zero_[n] = half_to_float(m[1]);
      }
    }
    kind_.resize(n, page_kind);
  }
  set_.count = n;
  seal(kind);
  if (mixed) decode(kv.head_dim);
}

void TokenRows::seal(RowKind kind) {
  const int n = set_.count;
  for (int i = n; n > 0 && i < padded(n); ++i) {
    row_[i] = row_[n - 1];
    scale_[i] = scale_[n - 1];
    zero_[i] = zero_[n - 1];
  }
  set_.kind = kind;
  set_.row = row_.data();
  set_.scale = scale_.data();
  set_.zero = zero_.data();
}

void TokenRows::decode(int head_dim) {
  const int n = set_.count;
  if (decoded_.size() < std::size_t(n) * head_dim) decoded_.resize(std::size_t(n) * head_dim);
  for (int t = 0; t < n;) {
    int end = t + 1;
    while (end < n && kind_[end] == kind_[t]) ++end;
    const RowSet run{kind_[t], end - t, row_.data() + t, scale_.data() + t, zero_.data() + t};
    row_kernels().decode(run, head_dim, decoded_.data() + std::int64_t{t} * head_dim, head_dim);
    t = end;
  }
  for (int t = 0; t < n; ++t) row_[t] = decoded_.data() + std::int64_t{t} * head_dim;
  seal(RowKind::f32);
  kind_.assign(n, RowKind::f32);
}

void TokenRows::rotate(const PagedKv& kv, const std::int32_t* rank, const RopeRows& rope) {
  decode(kv.head_dim);
  for (int t = 0; t < set_.count; ++t) {
    const int r = rank[place_[t]];
    row_kernels().rotate(decoded_.data() + std::int64_t{t} * kv.head_dim, rope.cosine_of(r), rope.sine_of(r),
                         kv.head_dim);
  }
}

void HeadRanks::fill(const PagedKv& kv) {
  rope_.reset();
  if (kv.rope != RopeRegime::cache_relative) return;
  heads_ = kv.kv_heads;
  longest_ = longest(kv);
  rope_ = rope_rows(kv.rope_table, std::max(longest_, 1));
  rank_.resize(std::size_t(kv.rows) * heads_ * longest_);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads_; ++h)
      token_ranks(kv, r, h, kv.tokens(r, h), rank_.data() + (std::int64_t{r} * heads_ + h) * longest_);
}

}  // namespace kvlab::ops
