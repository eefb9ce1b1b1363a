// Reduces the scores of all heads of a layer to one score for each text position.
#include <kvlab/ops.hpp>

#include <algorithm>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"
#include "ops/page/paged.hpp"
#include "ops/score/group.hpp"

namespace kvlab::ops {
namespace {

// Maps text positions to places in the KV heads of a row.
class Places {
 public:
  Places(const PagedKv& kv, int row) : heads_(static_cast<std::size_t>(kv.kv_heads)) {
    for (int h = 0; h < kv.kv_heads; ++h) {
      Head& head = heads_[h];
      head.position.resize(kv.tokens(row, h));
      token_positions(kv, row, h, kv.tokens(row, h), head.position.data());
      equal_ = equal_ && head.position == heads_[0].position;
    }
    if (equal_) return;
    for (Head& head : heads_) {
      for (std::size_t t = 0; t < head.position.size(); ++t)
        head.sorted.emplace_back(head.position[t], static_cast<std::int32_t>(t));
      std::sort(head.sorted.begin(), head.sorted.end());
    }
  }
  bool equal() const { return equal_; }  // all heads hold the same positions at the same places
  std::int32_t position(int head, int place) const { return heads_[head].position[place]; }
  // -1 = the head does not hold it.
  int place(int head, std::int32_t position) const {
    const auto& sorted = heads_[head].sorted;
    const auto at = std::lower_bound(sorted.begin(), sorted.end(), std::pair{position, std::int32_t{0}});
    return at != sorted.end() && at->first == position ? at->second : -1;
  }

 private:
  struct Head {
    std::vector<std::int32_t> position;
    std::vector<std::pair<std::int32_t, std::int32_t>> sorted;  // (position, place) by position
  };
  std::vector<Head> heads_;
  bool equal_ = true;
};

void reduce_row(const PagedKv& kv, int row, const View<const float, 3>& in, GroupRule rule, const Scores& out) {
  const int heads = static_cast<int>(in.extent[1]), group = heads / kv.kv_heads;
  const Places places(kv, row);
  if (places.equal()) {
    const int n = kv.tokens(row, 0);
    if (n == 0) return;
    reduce_group(&in(row, 0, 0), in.stride[1], heads, n, rule, 1.f, &out(row, 0, 0));
    for (int h = 1; h < kv.kv_heads; ++h) std::copy_n(&out(row, 0, 0), n, &out(row, h, 0));
    return;
  }
  for (int h = 0; h < kv.kv_heads; ++h)
    for (int t = 0; t < kv.tokens(row, h); ++t) {
      float x = 0;
      int held = 0;
      for (int other = 0; other < kv.kv_heads; ++other) {
        const int place = places.place(other, places.position(h, t));
        if (place < 0) continue;
        for (int q = other * group; q < (other + 1) * group; ++q, ++held) {
          const float y = in(row, q, place);
          x = held == 0 ? y : rule == GroupRule::max ? std::max(x, y) : x + y;
        }
      }
      out(row, h, t) = rule == GroupRule::mean ? x / static_cast<float>(held) : x;
    }
}

}  // namespace

void layer_reduce(const PagedKv& kv, View<const float, 3> in, GroupRule rule, Scores out, Stream s) {
  const char* op = "layer_reduce";
  check_kv(kv, op, s);
  check_scores(kv, in, "in", op, s);
  check_kv_scores(kv, out, "out", op, s);
  if (rule == GroupRule::softmax_mean)
    fail(Errc::unsupported, op, "got softmax_mean, wanted mean, max or sum: ops::softmax goes before it");
  if (s.device() == Device::cuda) return on_cuda<layer_reduce>(kv, in, rule, out, s);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) check_resident(kv, r, h, op);
#pragma omp parallel for schedule(dynamic) if (worth_threads(kv.rows * in.extent[1] * longest(kv)))
  for (int r = 0; r < kv.rows; ++r) reduce_row(kv, r, in, rule, out);
}

}  // namespace kvlab::ops
