// Sums of mass in attention's decode kernel (attend_kernel.cuh). Once the sums of the softmaxes are known, a warp turns
// the shares of its own units into probabilities (attend_shares.cuh) and adds them to token state. So all
// multiprocessors add, each as many tokens as it has read, and no launch follows.
#pragma once
#include "ops/attend/attend_line.cuh"

namespace kvlab::ops::decode {

// Waits until another block has merged a pair of `parts` blocks, which have all arrived or will: none of them waits
// before. That block then adds 1 to the counter, and so does each one that has waited. The last one leaves it 0.
__device__ __forceinline__ void wait_for_merge(int* arrived, int parts) {
  wait_for_value(arrived, parts + 1);
  if (add_released(arrived, 1) == 2 * parts - 1) *arrived = 0;
}

// A token's probability of the group, from those of its query heads, which come in order.
struct GroupSum {
  float value = 0;
  // Without branches, so that the tokens of a lane are added side by side.
  __device__ __forceinline__ void add(bool max, int head, float x) {
    const float most = value < x ? x : value, next = max ? most : value + x;
    value = head == 0 ? x : next;
  }
};

// Tokens t, t + 1, t + 8 and t + 9 of a record, which a lane adds: find, ask, add. Loads of several such objects run at
// once.
struct FourTokens {
  static constexpr int count = 4, at_once = 2;  // tokens; pairs of query heads whose shares are loaded together

  int left = 0;  // tokens from t on that are there; 0 = there is nothing to add
  PageEntry page;
  float* state;  // of token t
  int offset;    // of token t in its page
  const std::byte *high, *shares;
  const float* lse;
  float2 old[2];
  uint2 highs[at_once] = {}, of[at_once][2] = {};

  // x: the unit; four: which of its tokens; pair: that of x or one before it.
  template <int Runs>
  __device__ __forceinline__ void find(const Args& a, const Pairs<Runs>& pairs, int pair, int x, int four) {
    constexpr int of_record = MassShares::tokens / count;
    while (pairs.end(pair) <= x) ++pair;
    const int run = pairs.run_of(pair, x), t = four % of_record * 2,
              in_run = (x - pairs.begin(pair, run)) * pairs.unit + four / of_record * MassShares::tokens + t;
    left = pairs.tokens(pair, run) - in_run;
    if (left <= 0) return;
    const int row = a.pair_of.row(pair), head = pair - row * a.kv_heads, slot = a.slots[row];
    const PageEntry* entries = a.table + slot * a.table_slot + head * a.table_head;
    const int shift = __ffs(a.page_size) - 1;  // a record divides a page, and these pages are powers of two
    int place = in_run >> shift;
    offset = in_run & (a.page_size - 1);
    if (a.list) place = a.list[row * a.list_row + head * a.list_head + place];
    if (Runs == 2 && run == 1) place += lower_pages_of(a, slot, head);
    page = entries[place];
    take(a, a.shares.of(row, head), (place * a.page_size + offset) / MassShares::tokens, t,
         a.lse + row * a.lse_row + head * a.group);
  }
  // of_head: the head's shares; record: that of the tokens, in which token t has place t.
  __device__ __forceinline__ void take(const Args& a, const std::byte* of_head, int record, int t,
                                       const float* lse_of_head) {
    high = of_head + std::int64_t{record} * a.shares.record;
    shares = high + a.shares.behind_high + t * ((a.group + 1) / 2) * a.shares.of_pair;
    lse = lse_of_head;
    load(a, 0);
  }
  // Starts the loads that need the page's entry.
  __device__ __forceinline__ void ask(const Args& a) {
    if (left <= 0) return;
    if (page.frame < 0) {
      if (a.error) atomicOr(a.error, page_absent);
      left = 0;
      return;
    }
    state = reinterpret_cast<float*>(const_cast<std::byte*>(a.base) + page.frame * granule_bytes +
                                     (page.codec ? a.state.at[1] : a.state.at[0])) +
            offset;
#pragma unroll
    for (int k = 0; k < 2; ++k) old[k] = reinterpret_cast<const float2*>(state)[4 * k];
  }
  // Pairs of query heads from `first` on.
  __device__ __forceinline__ void load(const Args& a, int first) {
    const int pairs = (a.group + 1) / 2;
#pragma unroll
    for (int p = 0; p < at_once; ++p) {
      if (first + p >= pairs) continue;
      highs[p] = reinterpret_cast<const uint2*>(high)[first + p];
      of[p][0] = reinterpret_cast<const uint2*>(shares)[first + p];
      if (a.group > 1) of[p][1] = reinterpret_cast<const uint2*>(shares)[first + p + pairs];
    }
  }
  __device__ __forceinline__ void add(const Args& a) {
    if (left <= 0) return;
    if (a.group == 1) {  // a word has the shares of t and t + 8, the next one those of t + 1 and t + 9
      const uint2 both = of[0][0];
      of[0][0] = make_uint2(both.x & 0xffffu, both.x >> 16), of[0][1] = make_uint2(both.y & 0xffffu, both.y >> 16);
    }
    const bool max = a.rule == GroupRule::max;
    GroupSum sum[2][2];  // [token / 8, token % 2]
#pragma unroll 1
    for (int first = 0; 2 * first < a.group; first += at_once) {
      if (first > 0) load(a, first);
      float factor[2 * at_once];
#pragma unroll
      for (int j = 0; j < 2 * at_once; ++j) {
        const float top = __uint_as_float(j % 2 ? highs[j / 2].y : highs[j / 2].x);
        const float power = exp2_fast(top - lse[min(2 * first + j, a.group - 1)] * log2e);
        factor[j] = top == -INFINITY ? 0.f : power;
      }
#pragma unroll
      for (int j = 0; j < 2 * at_once; ++j) {
        const int p = j / 2, h = j % 2, head = 2 * first + j;
        if (head >= a.group) continue;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float x[2];
          Pair<__half>::unpack(k / 2 ? of[p][k % 2].y : of[p][k % 2].x, x[0], x[1]);
          sum[k / 2][k % 2].add(max, head, x[h] * factor[j]);
        }
      }
    }
    const float weight = a.rule == GroupRule::mean ? 1.f / static_cast<float>(a.group) : 1.f;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      old[k].x += sum[k][0].value * weight, old[k].y += sum[k][1].value * weight;
      if (left > 8 * k + 1)
        reinterpret_cast<float2*>(state)[4 * k] = old[k];
      else if (left > 8 * k)
        state[8 * k] = old[k].x;
    }
  }
};

// Adds the mass of a warp's units [begin, end). wait() returns once the block's pairs are merged, and all warps call
// it. The first loads start before that.
template <int Runs, class Wait>
__device__ __forceinline__ void add_shares(const Args& a, const Pairs<Runs>& pairs, const UnitLine<Runs>& line,
                                           int begin, int end, const Wait& wait) {
  constexpr int at_once = 4;
  const int of_unit = pairs.unit / FourTokens::count, count = (end - begin) * of_unit, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0, pair = line.pair_of(begin); first == 0 || first < count; first += 32 * at_once) {
    while (first < count && pairs.end(pair) <= begin + first / of_unit) ++pair;
    FourTokens tokens[at_once];
#pragma unroll
    for (int n = 0; n < at_once; ++n)
      if (const int at = first + 32 * n + lane; at < count)
        tokens[n].find(a, pairs, pair, begin + at / of_unit, at % of_unit);
#pragma unroll
    for (int n = 0; n < at_once; ++n) tokens[n].ask(a);
    if (first == 0) wait();
#pragma unroll
    for (int n = 0; n < at_once; ++n) tokens[n].add(a);
  }
}

}  // namespace kvlab::ops::decode
