#include "ops/attend/unread_mass.hpp"

#include <algorithm>
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
void flag_read(const UnreadMass& a, int head, std::vector<char>& seen) {
  const auto total = static_cast<int>(a.mass.extent[1]);
  const int n = a.kv.tokens(a.row, head), size = a.kv.page_size;
  seen.assign(static_cast<std::size_t>(total), 0);
  const auto see = [&](int begin, int end) {
    for (int t = begin; t < std::min(n, end); ++t) {
      const PageEntry& e = a.kv.entry(a.row, head, t / size);
      if (e.frame == null_frame) fail(Errc::internal, "unread_mass", "got a page that was read and has no frame");
      std::int32_t at;
      std::memcpy(&at, a.kv.frame(e) + positions_of(a.kv.layout(e), e) + t % size * sizeof at, sizeof at);
      if (at >= 0 && at < total && (a.window == 0 || at > total - 1 - a.window)) seen[static_cast<std::size_t>(at)] = 1;
    }
  };
  const IndexList* list = a.pages ? static_cast<const IndexList*>(a.pages) : a.tokens;
  if (!list) return see(0, n);
  const std::int64_t row = list->at(a.row);
  const int each = a.pages ? size : 1;
  for (int i = 0; i < list->count(row, head); ++i) {
    const int first = list->index(row, head, i) * each;
    see(first, first + each);
  }
}

}  // namespace

void unread_mass(const UnreadMass& a, Workspace& scratch, Stream s) {
  const char* op = "unread_mass";
  check_kv(a.kv, op, s);
  if (a.pages && a.tokens) fail(Errc::internal, op, "got lists of pages and of tokens, wanted one");
  const std::int64_t heads = a.kv.kv_heads, pages = a.page > 0 ? (a.mass.extent[1] + a.page - 1) / a.page : -1;
  if (a.row < 0 || a.row >= a.kv.rows || a.page <= 0 || a.mass.extent[0] % heads != 0 || a.sums.extent[0] != heads ||
      a.sums.extent[1] != pages || a.sums.extent[2] != 2 || a.read.extent[0] != heads || a.read.extent[1] != pages ||
      a.nonfinite.extent[0] != heads)
    fail(Errc::internal, op, "got row " + std::to_string(a.row) + " of " + std::to_string(a.kv.rows) + ", or results of another shape");
  if (s.device() == Device::cuda) return on_cuda<unread_mass>(a, scratch, s);
  const std::int64_t group = a.mass.extent[0] / heads, total = a.mass.extent[1];
  std::vector<std::vector<char>> read(static_cast<std::size_t>(heads));
  for (std::int64_t h = 0; h < heads; ++h) flag_read(a, static_cast<int>(h), read[static_cast<std::size_t>(h)]);
#pragma omp parallel for schedule(static) if (worth_threads(a.mass.extent[0] * total))
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::vector<char>& seen = read[static_cast<std::size_t>(h)];
    a.nonfinite(h) = 0;
    for (std::int64_t p = 0; p < pages; ++p) {
      a.sums(h, p, 0) = a.sums(h, p, 1) = a.read(h, p) = 0;
      const std::int64_t end = std::min(total, (p + 1) * a.page);
      for (std::int64_t t = p * a.page; t < end; ++t) a.read(h, p) |= seen[static_cast<std::size_t>(t)];
    }
    for (std::int64_t g = 0; g < group; ++g)
      for (std::int64_t p = 0; p < pages; ++p) {
        double all = 0, unread = 0;
        for (std::int64_t t = p * a.page; t < std::min(total, (p + 1) * a.page); ++t) {
          const float x = a.mass(h * group + g, t);
          if (!std::isfinite(x)) ++a.nonfinite(h);
          all += x;
          unread += seen[static_cast<std::size_t>(t)] ? 0.f : x;
        }
        a.sums(h, p, 0) += all;
        a.sums(h, p, 1) += unread;
      }
  }
}

}  // namespace kvlab::ops
