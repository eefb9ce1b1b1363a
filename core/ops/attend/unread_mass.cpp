#include "ops/attend/unread_mass.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/packed.hpp"

namespace kvlab::ops {
namespace {

// Flags of the text positions that one KV head's attention read.
void flag_read(const UnreadMass& a, int row, int head, std::vector<char>& seen) {
  const int n = a.kv.tokens(row, head), size = a.kv.page_size, newest = a.last[row];
  seen.assign(static_cast<std::size_t>(newest) + 1, 0);
  const auto see = [&](int begin, int end) {
    for (int t = begin; t < std::min(n, end); ++t) {
      const PageEntry& e = a.kv.entry(row, head, t / size);
      if (e.frame == null_frame) fail(Errc::internal, "unread_mass", "got a page that was read and has no frame");
      std::int32_t at;
      std::memcpy(&at, a.kv.frame(e) + positions_of(a.kv.layout(e), e) + t % size * sizeof at, sizeof at);
      if (at >= 0 && at <= newest && (a.window == 0 || at > newest - a.window)) seen[static_cast<std::size_t>(at)] = 1;
    }
  };
  const IndexList* list = a.pages ? static_cast<const IndexList*>(a.pages) : a.tokens;
  if (!list) return see(0, n);
  const std::int64_t at = list->at(row);
  const int each = a.pages ? size : 1;
  for (int i = 0; i < list->count(at, head); ++i) {
    const int first = list->index(at, head, i) * each;
    see(first, first + each);
  }
}

void sum_head(const UnreadMass& a, int row, int head, const std::vector<char>& seen) {
  const std::int64_t group = a.mass.extent[1] / a.kv.kv_heads, pages = a.read.extent[2],
                     total = static_cast<std::int64_t>(seen.size());
  const auto end_of = [&](std::int64_t p) { return std::min(total, (p + 1) * a.page); };
  a.nonfinite(row, head) = 0;
  for (std::int64_t p = 0; p < pages; ++p) {
    a.sums(row, head, p, 0) = a.sums(row, head, p, 1) = a.read(row, head, p) = 0;
    for (std::int64_t t = p * a.page; t < end_of(p); ++t) a.read(row, head, p) |= seen[static_cast<std::size_t>(t)];
  }
  for (std::int64_t g = 0; g < group; ++g)
    for (std::int64_t p = 0; p < pages; ++p) {
      double all = 0, unread = 0;
      for (std::int64_t t = p * a.page; t < end_of(p); ++t) {
        const float x = a.mass(row, head * group + g, t);
        if (!std::isfinite(x)) ++a.nonfinite(row, head);
        all += x;
        unread += seen[static_cast<std::size_t>(t)] ? 0.f : x;
      }
      a.sums(row, head, p, 0) += all;
      a.sums(row, head, p, 1) += unread;
    }
}

}  // namespace

void unread_mass(const UnreadMass& a, Workspace& scratch, Stream s) {
  const char* op = "unread_mass";
  check_kv(a.kv, op, s);
  if (a.pages && a.tokens) fail(Errc::internal, op, "got lists of pages and of tokens, wanted one");
  const std::int64_t rows = a.kv.rows, heads = a.kv.kv_heads,
                     pages = a.page > 0 ? (a.mass.extent[2] + a.page - 1) / a.page : -1;
  if (a.page <= 0 || a.mass.extent[0] != rows || a.mass.extent[1] % heads != 0 ||
      a.sums.extent != std::array<std::int64_t, 4>{rows, heads, pages, 2} ||
      a.read.extent != std::array<std::int64_t, 3>{rows, heads, pages} ||
      a.nonfinite.extent != std::array<std::int64_t, 2>{rows, heads} || !a.last)
    fail(Errc::internal, op,
         "got mass or results of another shape, wanted [row, query head, text position] and its pages");
  if (s.device() == Device::cuda) return on_cuda<unread_mass>(a, scratch, s);
  std::vector<std::vector<char>> read(static_cast<std::size_t>(rows * heads));
  for (std::size_t i = 0; i < read.size(); ++i)
    flag_read(a, static_cast<int>(i) / a.kv.kv_heads, static_cast<int>(i) % a.kv.kv_heads, read[i]);
#pragma omp parallel for schedule(static) if (worth_threads(rows * a.mass.extent[1] * a.mass.extent[2]))
  for (std::size_t i = 0; i < read.size(); ++i)
    sum_head(a, static_cast<int>(i) / a.kv.kv_heads, static_cast<int>(i) % a.kv.kv_heads, read[i]);
}

}  // namespace kvlab::ops
