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

// Sets 0 for the text positions that one KV head's attention read, and 1 for others.
void flag_read(const UnreadMass& a, int row, int head, std::vector<float>& left) {
  const int n = a.kv.tokens(row, head), size = a.kv.page_size, newest = a.last[row];
  left.assign(static_cast<std::size_t>(newest) + 1, 1);
  const auto see = [&](int begin, int end) {
    for (int t = begin, past; t < std::min(n, end); t = past) {
      const PageEntry& e = a.kv.entry(row, head, t / size);
      if (e.frame == null_frame) fail(Errc::internal, "unread_mass", "got a page that was read and has no frame");
      past = std::min({n, end, (t / size + 1) * size});
      const std::byte* const positions = a.kv.frame(e) + positions_of(a.kv.layout(e), e);
      for (; t < past; ++t) {
        std::int32_t at;
        std::memcpy(&at, positions + t % size * sizeof at, sizeof at);
        if (at >= 0 && at <= newest && (a.window == 0 || at > newest - a.window))
          left[static_cast<std::size_t>(at)] = 0;
      }
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

// Where a page's sum is known, that is also the sum of a page that was not read at all. Other pages are summed four by
// four, each in its own order: one sum waits for itself alone.
void sum_known(const UnreadMass& a, int row, int head, const std::vector<float>& left) {
  constexpr int beside = 4;
  const std::int64_t group = a.mass.extent[1] / a.kv.kv_heads, pages = a.read.extent[2], total = std::ssize(left);
  const double* const known = a.known + (row * a.kv.kv_heads + head) * pages;
  std::vector<std::int64_t> parts;  // pages of which some tokens were read
  a.nonfinite(row, head) = 0;
  for (std::int64_t p = 0; p < pages; ++p) {
    const std::int64_t begin = std::min(total, p * a.page), end = std::min(total, begin + a.page);
    std::int64_t unread = 0;
    for (std::int64_t t = begin; t < end; ++t) unread += left[static_cast<std::size_t>(t)] != 0;
    const bool all = unread == end - begin;
    a.read(row, head, p) = !all;
    a.sums(row, head, p, 0) = known[p];
    a.sums(row, head, p, 1) = all ? known[p] : 0;
    if (!all && unread > 0) parts.push_back(p);
  }
  constexpr std::int64_t line = 16;  // floats that the CPU fetches together
  for (std::int64_t g = 0; g < group; ++g)
    for (const std::int64_t p : parts)
      for (std::int64_t t = p * a.page; t < std::min(total, (p + 1) * a.page); t += line)
        __builtin_prefetch(&a.mass(row, head * group + g, t));
  for (std::int64_t g = 0; g < group; ++g) {
    const float* const mass = &a.mass(row, head * group + g, 0);
    for (std::size_t i = 0; i < parts.size();) {
      const std::int64_t* const p = parts.data() + i;
      if (i + beside <= parts.size() && (p[beside - 1] + 1) * a.page <= total) {
        double unread[beside] = {};
        for (std::int64_t t = 0; t < a.page; ++t)
          for (int j = 0; j < beside; ++j) {
            const std::int64_t at = p[j] * a.page + t;
            unread[j] += double{mass[at] * left[static_cast<std::size_t>(at)]};
          }
        for (int j = 0; j < beside; ++j) a.sums(row, head, p[j], 1) += unread[j];
        i += beside;
      } else {
        double unread = 0;
        for (std::int64_t at = *p * a.page; at < std::min(total, (*p + 1) * a.page); ++at)
          unread += double{mass[at] * left[static_cast<std::size_t>(at)]};
        a.sums(row, head, *p, 1) += unread;
        ++i;
      }
    }
  }
}

void sum_head(const UnreadMass& a, int row, int head, const std::vector<float>& left) {
  if (a.known) return sum_known(a, row, head, left);
  const std::int64_t group = a.mass.extent[1] / a.kv.kv_heads, pages = a.read.extent[2], total = std::ssize(left);
  const auto end_of = [&](std::int64_t p) { return std::min(total, (p + 1) * a.page); };
  const auto seen = [&](std::int64_t t) { return left[static_cast<std::size_t>(t)] == 0; };
  a.nonfinite(row, head) = 0;
  for (std::int64_t p = 0; p < pages; ++p) {
    a.sums(row, head, p, 0) = a.sums(row, head, p, 1) = a.read(row, head, p) = 0;
    for (std::int64_t t = p * a.page; t < end_of(p); ++t) a.read(row, head, p) |= seen(t);
  }
  for (std::int64_t g = 0; g < group; ++g)
    for (std::int64_t p = 0; p < pages; ++p) {
      double all = 0, unread = 0;
      for (std::int64_t t = p * a.page; t < end_of(p); ++t) {
        const float x = a.mass(row, head * group + g, t);
        if (!std::isfinite(x)) ++a.nonfinite(row, head);
        all += x;
        unread += seen(t) ? 0.f : x;
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
  if (a.known && s.device() == Device::cuda) fail(Errc::internal, op, "got known sums on a GPU, wanted none");
  if (s.device() == Device::cuda) return on_cuda<unread_mass>(a, scratch, s);
  std::vector<std::vector<float>> left(static_cast<std::size_t>(rows * heads));
  for (std::size_t i = 0; i < left.size(); ++i)
    flag_read(a, static_cast<int>(i) / a.kv.kv_heads, static_cast<int>(i) % a.kv.kv_heads, left[i]);
#pragma omp parallel for schedule(static) if (worth_threads(rows * a.mass.extent[1] * a.mass.extent[2]))
  for (std::size_t i = 0; i < left.size(); ++i)
    sum_head(a, static_cast<int>(i) / a.kv.kv_heads, static_cast<int>(i) % a.kv.kv_heads, left[i]);
}

}  // namespace kvlab::ops
