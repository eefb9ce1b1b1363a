// Work of the CPU's attention of decode steps: chunks of fixed size of each row and KV head's pages or tokens.
#pragma once
#include <cstdint>
#include <vector>

#include "ops/attend/attend.hpp"
#include "ops/page/token_rows.hpp"

namespace kvlab::ops {

struct AttendTask {
  int row, head, chunk;
  std::int64_t partial;  // index of its first query head's partial
};

// Neighbouring tokens of one page.
struct Piece {
  int page, begin, count;  // begin: offset in the page
};

// The plan of one call. The calling thread keeps it, so that a call allocates only to grow it.
class AttendPlan {
 public:
  // Checks every list entry and every page that the entries name. Errc::internal.
  void fill(const AttendArgs& a, int group);

  const std::vector<AttendTask>& tasks() const { return tasks_; }
  // The tasks of a head follow each other.
  int first_task(int row, int head) const { return first_task_[at(row, head)]; }
  int chunks(int row, int head) const { return first_task_[at(row, head) + 1] - first_task(row, head); }
  // Appends a chunk's pieces in the order of their tokens, at most `most` of them.
  void pieces(const PagedKv& kv, int row, int head, int chunk, int most, std::vector<Piece>& out) const;
  const HeadRanks& ranks() const { return ranks_; }

 private:
  struct Span {
    std::int64_t begin;  // index in lists_
    int count;           // entries: pages or tokens
  };
  std::size_t at(int row, int head) const { return std::size_t(row) * kv_heads_ + head; }
  void add_list(const PagedKv& kv, int row, int head, const IndexList* list);

  bool listed_ = false, of_tokens_ = false;
  int kv_heads_ = 0, chunk_entries_ = 1;
  std::vector<std::int32_t> lists_;
  std::vector<Span> spans_;      // [row, kv_head]
  std::vector<int> first_task_;  // [row, kv_head] + 1
  std::vector<AttendTask> tasks_;
  HeadRanks ranks_;
};

}  // namespace kvlab::ops
