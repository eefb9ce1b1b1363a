// Stored tokens of one head as a RowSet, for the row kernels.
#pragma once
#include <kvlab/kv.hpp>

#include <vector>

#include "ops/rope_cache.hpp"
#include "ops/row_kernels.hpp"

namespace kvlab::ops {

// Reusable scratch, one per thread: nothing is allocated once it has grown. Pages must be resident (check_page).
class TokenRows {
 public:
  // Tokens of the pages list[0 .. count) (first + i when list is null), in that order.
  void gather(const PagedKv& kv, int row, int head, KvSide side, const std::int32_t* list, int first, int count);
  // Rotates the gathered keys by their rank: rank[t] belongs to token place t. They become f32.
  void rotate(const PagedKv& kv, const std::int32_t* rank, const RopeRows& rope);
  // Decodes everything to f32 (also where pages of different codecs meet).
  void decode(int head_dim);

  const RowSet& set() const { return set_; }
  const float* const* f32_rows() const { return reinterpret_cast<const float* const*>(row_.data()); }
  int count() const { return set_.count; }
  int place(int i) const { return place_[i]; }                 // of the i-th gathered token
  std::int32_t position(int i) const { return position_[i]; }  // text position

 private:
  void seal(RowKind kind);

  RowSet set_;
  std::vector<const void*> row_;
  std::vector<float> scale_, zero_, decoded_;
  std::vector<std::int32_t> place_, position_;
  std::vector<RowKind> kind_;
};

// Ranks of every head of the call for the cache_relative regime, else null. [row, kv_head, longest] in `storage`.
class HeadRanks {
 public:
  void fill(const PagedKv& kv);
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
