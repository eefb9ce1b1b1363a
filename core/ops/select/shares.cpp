// Sums over the tokens of a head, and lists of tokens that get a score.
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/select/select.hpp"

namespace kvlab::ops {
namespace {

template <class T>
void check_heads(const PagedKv& kv, const View<const float, 3>& in, const View<T, 2>& out, const char* op, Stream s) {
  check_kv(kv, op, s);
  check_scores(kv, in, "scores", op, s);
  if (out.extent[0] < kv.rows || out.extent[1] != in.extent[1])
    fail(Errc::internal, op, "got an output of another shape, wanted [row, head] with the heads of the scores");
}

// Calls f(row, head, pinned) for every head of the scores. pinned: [token] marks.
template <class F>
void for_heads(const PagedKv& kv, std::int64_t heads, const Pins& pins, F f) {
  const int group = static_cast<int>(heads) / kv.kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic) if (worth_threads(std::int64_t{longest(kv)} * kv.rows * heads))
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      thread_local std::vector<char> pinned;
      pinned.resize(static_cast<std::size_t>(kv.tokens(r, h)));
      mark_pins(kv, r, h, pins, pinned.data());
      for (int q = h * group; q < (h + 1) * group; ++q) f(r, q, pinned);
    }
}

// The fewest of `scores`, all above 0 and the greatest first, that add up to this share of their sum. It orders them.
int count_of_share(std::vector<float>& scores, double share) {
  std::sort(scores.begin(), scores.end(), std::greater<>());
  double all = 0, sum = 0;
  for (auto x = scores.rbegin(); x != scores.rend(); ++x) all += double{*x};
  int count = 0;
  for (; count < static_cast<int>(scores.size()) && sum < share * all; ++count)
    sum += double{scores[static_cast<std::size_t>(count)]};
  return count;
}

}  // namespace

void head_sum(const PagedKv& kv, View<const float, 3> in, Pins leave_out, View<float, 2> out, Stream s) {
  check_heads(kv, in, out, "head_sum", s);
  if (s.device() == Device::cuda) return on_cuda<head_sum>(kv, in, leave_out, out, s);
  for_heads(kv, in.extent[1], leave_out, [&](int row, int head, const std::vector<char>& pinned) {
    double sum = 0;
    for (std::size_t t = 0; t < pinned.size(); ++t) sum += pinned[t] ? 0. : double{in(row, head, t)};
    out(row, head) = static_cast<float>(sum);
  });
}

void tokens_of_share(const PagedKv& kv, View<const float, 3> scores, float share, Pins leave_out, View<float, 2> out,
                     Stream s) {
  const char* op = "tokens_of_share";
  check_heads(kv, scores, out, op, s);
  if (!(share > 0 && share <= 1))
    fail(Errc::internal, op, "got a share of " + std::to_string(share) + ", wanted more than 0 and at most 1");
  if (s.device() == Device::cuda) return on_cuda<tokens_of_share>(kv, scores, share, leave_out, out, s);
  for_heads(kv, scores.extent[1], leave_out, [&](int row, int head, const std::vector<char>& pinned) {
    thread_local std::vector<float> positive;
    positive.clear();
    for (std::size_t t = 0; t < pinned.size(); ++t)
      if (const float x = scores(row, head, t); !pinned[t] && x > 0) positive.push_back(x);
    out(row, head) = static_cast<float>(count_of_share(positive, double{share}));
  });
}

void set_listed(const TokenList& list, float value, Scores scores, Stream s) {
  const std::int64_t rows = scores.extent[0], heads = scores.extent[1];
  if (list.count.extent[1] < heads || list.index.extent[1] < heads ||
      (!list.slots && (list.count.extent[0] < rows || list.index.extent[0] < rows)))
    fail(Errc::internal, "set_listed", "got too small a list, wanted the rows and heads of the scores");
  if (s.device() == Device::cuda) return on_cuda<set_listed>(list, value, scores, s);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t h = 0; h < heads; ++h)
      for (int i = 0; i < list.count(list.at(r), h); ++i)
        if (const std::int64_t place = list.index(list.at(r), h, i); place >= 0 && place < scores.extent[2])
          scores(r, h, place) = value;
}

}  // namespace kvlab::ops
