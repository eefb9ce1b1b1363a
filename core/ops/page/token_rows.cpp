#include "ops/page/token_rows.hpp"

#include <algorithm>
#include <cstring>

#include "base/half.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::ops {

const float* GroupedRows::decode(const std::byte* frame, const PageLayout& l, KvSide side, int begin, int count) {
  if (used_ == rows_.size()) rows_.emplace_back();
  std::vector<float>& rows = rows_[used_++];
  const int dim = l.head_dim;
  rows.resize(std::size_t(count) * dim);
  const bool key = side == KvSide::key;
  const CodeAxis axis = side_of(l, key).axis;
  const int group = group_of(side_of(l, key), l.page_size, dim);
  ones_.resize(std::max(ones_.size(), std::size_t(count)), {0x3c00, 0});
  RowRun codes;
  codes.data = frame + row_offset(l, key, begin);
  codes.meta = reinterpret_cast<const std::byte*>(ones_.data());
  codes.stride = row_bytes(l, key);
  codes.kind = row_kind(side_of(l, key), l.dtype);
  codes.count = count;
  row_kernels().decode(codes, dim, rows.data(), dim);
  for (int t = begin; t < begin + count; ++t) {
    if (axis == CodeAxis::token || t == begin || t % group == 0)
      for (int d = 0; d < dim; ++d) {
        if (axis == CodeAxis::token && d % group) {
          scale_[d] = scale_[d - 1], zero_[d] = zero_[d - 1];
          continue;
        }
        std::uint16_t meta[2];
        std::memcpy(meta, frame + meta_offset(l, key, t, d), 4);
        scale_[d] = half_to_float(meta[0]), zero_[d] = half_to_float(meta[1]);
      }
    float* row = rows.data() + std::int64_t{t - begin} * dim;
    for (int d = 0; d < dim; ++d) row[d] = row[d] * scale_[d] + zero_[d];
  }
  return rows.data();
}

RowRun page_run(const PagedKv& kv, const PageEntry& e, KvSide side, int begin, int count, GroupedRows& grouped) {
  const PageLayout& l = kv.layout(e);
  const bool key = side == KvSide::key;
  const std::byte* frame = kv.frame(e);
  RowRun run;
  run.count = count;
  if (side_of(l, key).grouped()) {
    run.data = grouped.decode(frame, l, side, begin, count);
    run.stride = std::int64_t{l.head_dim} * 4;
    return run;
  }
  run.data = frame + row_offset(l, key, begin);
  run.meta = frame + meta_offset(l, key, begin);
  run.stride = row_bytes(l, key);
  run.kind = row_kind(side_of(l, key), l.dtype);
  return run;
}

void TokenRows::gather(const PagedKv& kv, int row, int head, KvSide side, const std::int32_t* list, int first,
                       int count) {
  const int tokens = kv.tokens(row, head);
  runs_.clear();
  grouped_.clear();
  place_.clear();
  position_.clear();
  for (int i = 0; i < count; ++i) {
    const int page = list ? list[i] : first + i, begin = page * kv.page_size;
    const PageEntry& e = kv.entry(row, head, page);
    const int in_page = std::min(kv.page_size, tokens - begin);
    runs_.push_back(page_run(kv, e, side, 0, in_page, grouped_));
    const auto* position = reinterpret_cast<const std::int32_t*>(kv.frame(e) + kv.layout(e).positions);
    position_.insert(position_.end(), position, position + in_page);
    for (int t = 0; t < in_page; ++t) place_.push_back(begin + t);
  }
  runs_.resize(runs_.size() + run_ahead);
}

const float* TokenRows::decode(int head_dim) {
  if (decoded_.size() < std::size_t(count()) * head_dim) decoded_.resize(std::size_t(count()) * head_dim);
  float* to = decoded_.data();
  for (int i = 0; i < run_count(); ++i) {
    row_kernels().decode(runs_[i], head_dim, to, head_dim);
    to += std::int64_t{runs_[i].count} * head_dim;
  }
  return decoded_.data();
}

const float* TokenRows::rotate(const PagedKv& kv, const std::int32_t* rank, const RopeRows& rope) {
  decode(kv.head_dim);
  for (int t = 0; t < count(); ++t) {
    const int r = rank[place_[t]];
    row_kernels().rotate(decoded_.data() + std::int64_t{t} * kv.head_dim, rope.cosine_of(r), rope.sine_of(r),
                         kv.head_dim);
  }
  return decoded_.data();
}

void HeadRanks::fill(const PagedKv& kv, const Heads& heads) {
  rope_.reset();
  if (kv.rope != RopeRegime::cache_relative) return;
  heads_ = kv.kv_heads;
  longest_ = longest(kv);
  rope_ = rope_rows(kv.rope_table, std::max(longest_, 1));
  rank_.resize(std::size_t(kv.rows) * heads_ * longest_);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads_; ++h)
      if (heads.on(kv.slots[r], h))
        token_ranks(kv, r, h, kv.tokens(r, h), rank_.data() + (std::int64_t{r} * heads_ + h) * longest_);
}

void HeadRanks::fill_beyond(const PagedKv& kv, const std::int32_t* last, int most) {
  heads_ = kv.kv_heads;
  longest_ = longest(kv);
  int furthest = 0;
  rank_.assign(std::size_t(kv.rows) * heads_ * longest_, 0);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < heads_; ++h) {
      std::int32_t* beyond = rank_.data() + (std::int64_t{r} * heads_ + h) * longest_;
      for (int t = 0; t < kv.tokens(r, h); ++t) {
        const PageEntry& e = kv.entry(r, h, t / kv.page_size);
        if (e.frame == null_frame) continue;  // a page that attention does not read
        const auto* position = reinterpret_cast<const std::int32_t*>(kv.frame(e) + kv.layout(e).positions);
        beyond[t] = std::max(0, last[r] - most - position[t % kv.page_size]);
        furthest = std::max(furthest, beyond[t]);
      }
    }
  if (furthest == 0) return rope_.reset();  // keys are read as they are
  RopeTable rope = kv.rope_table;
  rope.attention_scale = 1;  // cached keys carry it
  rope_ = rope_rows(rope, furthest + 1);
}

}  // namespace kvlab::ops
