// Reductions and sums over the lanes of a warp. All 32 lanes take part, and each gets its result. The tests' emulator
// replaces this file: there an exchange between lanes costs far more than what is exchanged.
#pragma once
#include <cstring>
#include <type_traits>

namespace kvlab::cuda {

constexpr unsigned all_lanes = ~0u;

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Least {
  __device__ __forceinline__ float operator()(float a, float b) const { return fminf(a, b); }
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return min(a, b);
  }
};
struct Most {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return max(a, b);
  }
};

template <class T>
__device__ __forceinline__ T of_lane_at(T x, int distance) {
  if constexpr (std::is_arithmetic_v<T>) {
    return __shfl_xor_sync(all_lanes, x, distance);
  } else {
    static_assert(sizeof(T) % 4 == 0);
    unsigned words[sizeof(T) / 4];
    std::memcpy(words, &x, sizeof x);
#pragma unroll
    for (unsigned& w : words) w = __shfl_xor_sync(all_lanes, w, distance);
    std::memcpy(&x, words, sizeof x);
    return x;
  }
}

// Joins the values of lanes at distance First, then twice or half as far each time, up to Last: 16 and 1 join all
// lanes, 4 and 16 those with the same place in their four, 1 and 2 the lanes of a four. f has no state.
template <int First = 16, int Last = 1, class T, class F>
__device__ __forceinline__ T join_lanes(T x, F f) {
  static_assert(First > 0 && Last > 0);
  if constexpr (First < Last) {
#pragma unroll
    for (int d = First; d <= Last; d *= 2) x = f(x, of_lane_at(x, d));
  } else {
#pragma unroll
    for (int d = First; d >= Last; d /= 2) x = f(x, of_lane_at(x, d));
  }
  return x;
}
template <int First = 16, int Last = 1, class T>
__device__ __forceinline__ T sum_of_lanes(T x) {
  return join_lanes<First, Last>(x, Sum{});
}
template <int First = 16, int Last = 1, class T>
__device__ __forceinline__ T least_of_lanes(T x) {
  return join_lanes<First, Last>(x, Least{});
}
template <int First = 16, int Last = 1, class T>
__device__ __forceinline__ T most_of_lanes(T x) {
  return join_lanes<First, Last>(x, Most{});
}

// The sum of the values of lanes at distance first, then twice as far each time, up to 16.
template <class T>
__device__ __forceinline__ T sum_of_lanes_from(int first, T x) {
  for (int d = first; d < 32; d *= 2) x += of_lane_at(x, d);
  return x;
}

// The sum of the lanes up to and with this one.
template <class T>
__device__ __forceinline__ T sum_through_lane(T x) {
  static_assert(std::is_integral_v<T>);  // the emulator's order differs
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (unsigned d = 1; d < 32; d *= 2)
    if (const T before = __shfl_up_sync(all_lanes, x, d); lane >= d) x += before;
  return x;
}

}  // namespace kvlab::cuda
