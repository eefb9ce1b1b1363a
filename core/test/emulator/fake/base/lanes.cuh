// base/lanes.cuh for the emulator: lanes meet once for all rounds of a reduction, which join the same values in the
// same order.
#pragma once
#include <cuda_runtime.h>

namespace kvlab::cuda {

constexpr unsigned all_lanes = ~0u;

struct Sum {
  template <class T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct Least {
  float operator()(float a, float b) const { return fminf(a, b); }
  template <class T>
  T operator()(T a, T b) const {
    return std::min(a, b);
  }
};
struct Most {
  float operator()(float a, float b) const { return fmaxf(a, b); }
  template <class T>
  T operator()(T a, T b) const {
    return std::max(a, b);
  }
};

template <class T>
T of_lane_at(T x, int distance) {
  if (distance < 1 || distance > 31) emulator::fail("got a distance of " + std::to_string(distance) + " lanes");
  struct Part {
    T x;
    int distance;
  };
  return emulator::together<T>("of_lane_at", all_lanes, Part{x, distance}, [](const Part* in, T* out) {
    for (int i = 0; i < 32; ++i) out[i] = in[i ^ in[i].distance].x;
  });
}

template <class F, class T>
void join_at(T* of_lanes, int distance) {
  T before[32];
  std::copy(of_lanes, of_lanes + 32, before);
  for (int i = 0; i < 32; ++i) of_lanes[i] = F{}(before[i], before[i ^ distance]);
}

template <int First = 16, int Last = 1, class T, class F>
T join_lanes(T x, F) {
  static_assert(First > 0 && Last > 0);
  // The name tells one reduction from another, where lanes of a warp come to different ones.
  return emulator::together<T>(__PRETTY_FUNCTION__, all_lanes, x, [](const T* in, T* out) {
    std::copy(in, in + 32, out);
    if constexpr (First < Last)
      for (int d = First; d <= Last; d *= 2) join_at<F>(out, d);
    else
      for (int d = First; d >= Last; d /= 2) join_at<F>(out, d);
  });
}
template <int First = 16, int Last = 1, class T>
T sum_of_lanes(T x) {
  return join_lanes<First, Last>(x, Sum{});
}
template <int First = 16, int Last = 1, class T>
T least_of_lanes(T x) {
  return join_lanes<First, Last>(x, Least{});
}
template <int First = 16, int Last = 1, class T>
T most_of_lanes(T x) {
  return join_lanes<First, Last>(x, Most{});
}

template <class T>
T sum_of_lanes_from(int first, T x) {
  struct Part {
    T x;
    int first;
  };
  return emulator::together<T>("sum_of_lanes_from", all_lanes, Part{x, first}, [](const Part* in, T* out) {
    for (int i = 0; i < 32; ++i) {
      out[i] = in[i].x;
      if (in[i].first != in[0].first) emulator::fail("got lanes of one warp that add from other distances on");
    }
    for (int d = in[0].first; d < 32; d *= 2) join_at<Sum>(out, d);
  });
}

template <class T>
T sum_through_lane(T x) {
  static_assert(std::is_integral_v<T>);
  return emulator::together<T>("sum_through_lane", all_lanes, x, [](const T* in, T* out) {
    T sum = 0;
    for (int i = 0; i < 32; ++i) out[i] = sum += in[i];
  });
}

}  // namespace kvlab::cuda
