// Levels of tokens. A block takes a head, or all heads of a row where these keep the same numbers.
#include "base/lanes.cuh"
#include "ops/select/levels.hpp"

#include "ops/page/paged.cuh"
#include "ops/select/surplus.cuh"

namespace kvlab::ops {
namespace {

using namespace cuda;
using namespace device;

constexpr int threads = 256, most_heads = 256;

struct Levels {
  DeviceKv kv;
  View<const float, 3> sums;
  const std::int32_t* seen;
  LevelRule rule;
  View<std::uint8_t, 3> out;
  LevelNumbers numbers;
};

__global__ void __launch_bounds__(threads) levels_kernel(const __grid_constant__ Levels a) {
  __shared__ SelectShared s;
  const int row = blockIdx.y, seen = a.seen[row], slot = a.kv.kv.slots[row], first = first_counted(a.rule, seen);
  const int heads = a.kv.kv_heads, begin = a.rule.same_numbers ? 0 : blockIdx.x,
            end = a.rule.same_numbers ? heads : begin + 1;
  const auto tokens = [&](int head) {
    return static_cast<int>(
        min(static_cast<std::int64_t>(a.kv.tokens(row, head)), min(a.sums.extent[2], a.out.extent[2])));
  };
  std::int64_t all_high = 0, all_low = 0;
  for (int head = begin; head < end; ++head) {
    const int n = tokens(head);
    unsigned high = 0, low = 0, highs, lows;
    for (int t = threadIdx.x; t < n; t += threads) {
      const int position = a.kv.position(row, head, t);
      const bool open = position < seen - a.rule.window;
      const std::uint8_t level =
          open ? level_of(a.rule, mean_of(a.sums(row, head, t), seen, position, first), seen, position) : 0;
      a.out(row, head, t) = level;
      high += open && level == 0, low += level == 1;
    }
    block_scan(high, s.scan, highs);
    block_scan(low, s.scan, lows);
    all_high += highs, all_low += lows;
    if (threadIdx.x == 0) {
      number_of(a.numbers.pending, slot, head) = 0;
      if (a.numbers.first.data) number_of(a.numbers.first, slot, head) = first;
    }
  }
  if (!a.rule.same_numbers) return;
  const int high = rounded_mean(all_high, heads), low = rounded_mean(all_low, heads);
  for (int head = 0; head < heads; ++head) {
    const int n = tokens(head), bounds[] = {0, n};
    const auto key = [&](int, int t, unsigned i, unsigned long long& k) {
      const int position = a.kv.position(row, head, t);
      if (position >= seen - a.rule.window) return false;
      k = selection_key(mean_of(a.sums(row, head, t), seen, position, first), i);
      return true;
    };
    unsigned own = 0, open;
    for (int t = threadIdx.x; t < n; t += threads) {
      unsigned long long k;
      own += key(0, t, static_cast<unsigned>(t), k);
    }
    block_scan(own, s.scan, open);
    // A threshold that so many reach.
    const auto threshold = [&](int wanted) {
      return wanted <= 0                        ? ~0ull
             : wanted >= static_cast<int>(open) ? 0ull
                                                : radix_threshold(key, bounds, 1, static_cast<unsigned>(wanted), 0, s);
    };
    const unsigned long long to_high = threshold(high);
    __syncthreads();
    const unsigned long long to_low = threshold(high + low);
    for (int t = threadIdx.x; t < n; t += threads)
      if (unsigned long long k; key(0, t, static_cast<unsigned>(t), k))
        a.out(row, head, t) = k >= to_high ? 0 : k >= to_low ? 1 : level_gone;
    __syncthreads();
  }
}

struct Demote {
  PagedKv kv;
  FrameColumn sums, positions;
  LevelRule rule;
  LevelNumbers numbers;
  Demotion to;
};

// Keys of a head's tokens that may step down, the least ones; none = all bits set.
enum Which { least_high, least_low, leaving, keys };

struct Found {
  LevelCandidates of[most_heads];
  unsigned long long of_warps[threads / 32][keys];
};

__device__ __forceinline__ Candidate candidate_of(unsigned long long key) {
  return candidate(static_cast<int>(0xffffffffu - static_cast<unsigned>(key)),
                   score_of_key(static_cast<unsigned>(key >> 32)));
}

// Blocks of up to `threads` threads.
template <int Page>
__global__ void __launch_bounds__(threads) demote_kernel(const __grid_constant__ Demote a) {
  constexpr int each = 4;  // tokens that a thread loads at once
  __shared__ Found found;
  const int row = blockIdx.y, slot = a.kv.slots[row], block = static_cast<int>(blockDim.x), warps = block / 32;
  const int begin = a.rule.same_numbers ? 0 : blockIdx.x, end = a.rule.same_numbers ? a.kv.kv_heads : begin + 1;
  const auto lower = [&](int head) { return a.kv.lower_pages.data ? a.kv.lower_pages(slot, head) : 0; };
  for (int head = begin; head < end; ++head) {
    const HeadTokens<Page> tokens(a.kv, slot, head);
    const auto position_of = [&](const PageEntry& e, int t) {
      return *tokens.template number<const std::int32_t>(e, a.positions, t);
    };
    const int n = a.kv.length(slot, head), seen = n > 0 ? position_of(tokens.entry(n - 1), n - 1) + 1 : 0;
    const int low_tokens = lower(head) * a.kv.page_size + number_of(a.numbers.pending, slot, head);
    const int first = a.numbers.first.data ? number_of(a.numbers.first, slot, head) : 0;
    unsigned long long least[keys] = {~0ull, ~0ull, ~0ull};
    for (int from = threadIdx.x; from < n; from += block * each) {
      std::int32_t position[each];
      float sum[each];
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int t = min(from + i * block, n - 1);
        const PageEntry e = tokens.entry(t);
        position[i] = position_of(e, t), sum[i] = *tokens.template number<const float>(e, a.sums, t);
      }
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int t = from + i * block;
        if (t >= n || position[i] > seen - a.rule.window) continue;
        const float mean = mean_of(sum[i], seen, position[i], first);
        const unsigned long long key = selection_key(mean, static_cast<unsigned>(t));
        least[least_low] = min(least[least_low], t < low_tokens ? key : ~0ull);
        if (t < low_tokens) continue;
        least[least_high] = min(least[least_high], key);
        if (position[i] == seen - a.rule.window) least[leaving] = key;
      }
    }
    __syncthreads();  // every thread has read what the head before has found
#pragma unroll
    for (int k = 0; k < keys; ++k) {
      least[k] = least_of_lanes(least[k]);
      if (threadIdx.x % 32 == 0) found.of_warps[threadIdx.x / 32][k] = least[k];
    }
    __syncthreads();
    if (threadIdx.x > 0) continue;
    for (int w = 1; w < warps; ++w)
#pragma unroll
      for (int k = 0; k < keys; ++k) least[k] = min(least[k], found.of_warps[w][k]);
    LevelCandidates c = no_candidates(seen);
    if (least[least_high] != ~0ull) c.high = candidate_of(least[least_high]);
    if (least[least_low] != ~0ull) c.low = candidate_of(least[least_low]);
    if (a.rule.leaving_decides && least[leaving] != ~0ull) c.leaving = candidate_of(least[leaving]);
    found.of[head - begin] = c;
  }
  __syncthreads();
  const auto of = [&](int i) -> const LevelCandidates& { return found.of[i]; };
  for (int i = threadIdx.x; i < end - begin; i += block) {
    const int head = begin + i;
    const Fall fall = fall_of(a.rule, a.rule.same_numbers ? with_means(of(i), of, end - begin) : of(i));
    write_fall(fall, of(i), lower(head), a.kv.page_size, number_of(a.numbers.pending, slot, head), a.to, row, head);
  }
}

dim3 grid_of(const PagedKv& kv, const LevelRule& rule) {
  return dim3(rule.same_numbers ? 1u : static_cast<unsigned>(kv.kv_heads), static_cast<unsigned>(kv.rows));
}

}  // namespace

static void levels_cuda(const PagedKv& kv, View<const float, 3> sums, const std::int32_t* seen, const LevelRule& rule,
                        View<std::uint8_t, 3> out, const LevelNumbers& numbers, Stream s) {
  if (kv.rows == 0) return;
  const Levels a{DeviceKv(kv), sums, seen, rule, out, numbers};
  levels_kernel<<<grid_of(kv, rule), threads, 0, stream_of(s)>>>(a);
  check_launch("levels");
}
KVLAB_ON_CUDA(levels, levels_cuda);

static void demote_cuda(const StateColumn& sums, const LevelRule& rule, const LevelNumbers& numbers, const Demotion& to,
                        Stream s) {
  const PagedKv& kv = *sums.kv;
  if (kv.rows == 0) return;
  if (kv.kv_heads > most_heads)
    throw Error(Errc::unsupported,
                "got " + std::to_string(kv.kv_heads) + " KV heads, wanted at most " + std::to_string(most_heads),
                "op demote (CUDA)");
  const Demote a{kv, FrameColumn::state(kv, sums.column), FrameColumn::positions(kv), rule, numbers, to};
  // Blocks of short heads are small, so that many run at once.
  const bool is_short = kv.table.extent[2] * kv.page_size <= 16 * threads;
  with_page_size(kv.page_size, [&](auto page) {
    const auto kernel = demote_kernel<decltype(page)::value>;
    kernel<<<grid_of(kv, rule), is_short ? 64 : threads, 0, stream_of(s)>>>(a);
  });
  check_launch("demote");
}
KVLAB_ON_CUDA(demote, demote_cuda);

}  // namespace kvlab::ops
