// Runs of one head's stored tokens, for the row kernels.
#pragma once
#include <kvlab/kv.hpp>

#include <array>
#include <vector>

#include "ops/page/codes.hpp"
#include "ops/page/rope_cache.hpp"
#include "ops/page/row_kernels.hpp"

namespace kvlab::ops {

inline RowKind row_kind(CodecSide side, DType dtype) {
  if (side.kind == CodeKind::e4m3) return RowKind::e4m3;
  if (side.bits) return side.bits == 8 ? RowKind::u8 : side.bits == 4 ? RowKind::u4 : RowKind::u2;
  return dtype == DType::f32 ? RowKind::f32 : RowKind::bf16;
}

// Rows of codes in groups, decoded, because a run of codes has one scale for each row. Scratch of one thread, used
// again after clear().
class GroupedRows {
 public:
  void clear() { used_ = 0; }
  const float* decode(const std::byte* frame, const PageLayout& l, KvSide side, int begin, int count);

 private:
  std::vector<std::vector<float>> rows_;  // of each page
  std::size_t used_ = 0;
  std::vector<std::array<std::uint16_t, 2>> ones_;  // scale 1 and zero 0 in f16, for kernels that decode rows
  float scale_[256], zero_[256];                    // of the elements of a row
};

// One side of tokens begin .. begin + count - 1 of a page. It lasts until the next grouped.clear().
RowRun page_run(const PagedKv& kv, const PageEntry& e, KvSide side, int begin, int count, GroupedRows& grouped);

// Scratch of one thread, used again by every call: it allocates only to grow. Pages must be resident (check_page).
class TokenRows {
 public:
  // Gathers the tokens of pages list[0 .. count) in that order; without a list, of pages first .. first + count - 1.
  void gather(const PagedKv& kv, int row, int head, KvSide side, const std::int32_t* list, int first, int count);
  // Decodes the gathered rows to f32 [token, head_dim].
  const float* decode(int head_dim);
  // Decodes the gathered keys and rotates them by rank; rank is indexed by the token's place in the cache.
  const float* rotate(const PagedKv& kv, const std::int32_t* rank, const RopeRows& rope);

  const RowRun* runs() const { return runs_.data(); }  // run_ahead empty runs follow
  int run_count() const { return static_cast<int>(runs_.size()) - run_ahead; }
  int count() const { return static_cast<int>(place_.size()); }
  int place(int i) const { return place_[i]; }                 // place in the cache of the i-th gathered token
  std::int32_t position(int i) const { return position_[i]; }  // text position of the i-th gathered token

 private:
  std::vector<RowRun> runs_;
  GroupedRows grouped_;
  std::vector<float> decoded_;
  std::vector<std::int32_t> place_, position_;
};

// Ranks [row, kv_head, longest] of every head of the call in the cache_relative regime; null in other regimes.
class HeadRanks {
 public:
  void fill(const PagedKv& kv, const Heads& heads = {});  // it reads no page of a head that `heads` leaves out
  // In place of ranks: how many text positions a token lies further than `most` before last[row].
  void fill_beyond(const PagedKv& kv, const std::int32_t* last, int most);
  const std::int32_t* of(int row, int head) const {
    return rope_ ? rank_.data() + (std::int64_t{row} * heads_ + head) * longest_ : nullptr;
  }
  const RopeRows* rope() const { return rope_.get(); }

 private:
  std::shared_ptr<const RopeRows> rope_;
  std::vector<std::int32_t> rank_;
  int heads_ = 0, longest_ = 0;
};

}  // namespace kvlab::ops
