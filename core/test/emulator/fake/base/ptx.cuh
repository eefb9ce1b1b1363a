// base/ptx.cuh for the emulator: each function does the work of its PTX instruction.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>

#include "ops/page/codes.hpp"

namespace kvlab::cuda {

template <class T>
struct Pair {
  static unsigned pack(float low, float high) { return T(low).bits | static_cast<unsigned>(T(high).bits) << 16; }
  static void unpack(unsigned x, float& low, float& high) {
    T t;
    t.bits = static_cast<std::uint16_t>(x), low = t;
    t.bits = static_cast<std::uint16_t>(x >> 16), high = t;
  }
};

inline unsigned and_or(unsigned x, unsigned mask, unsigned bits) { return (x & mask) | bits; }
inline void keep_in_register(unsigned&) {}

inline unsigned halves_of_e4m3(unsigned two) {
  const auto number = [](unsigned x) {
    const int exponent = static_cast<int>(x >> 3 & 15), fraction = static_cast<int>(x & 7);
    const float size = exponent == 15 && fraction == 7 ? NAN
                       : exponent == 0                 ? std::ldexp(static_cast<float>(fraction), -9)
                                                       : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    return x & 0x80 ? -size : size;
  };
  return Pair<__half>::pack(number(two), number(two >> 8));
}

inline unsigned e4m3_of_floats(float low, float high) {
  return ops::to_e4m3(low) | static_cast<unsigned>(ops::to_e4m3(high)) << 8;
}

// A sum is exact in double. It rounds to f32 and then to f16, which differs from a GPU's at ties alone.
template <class F>
unsigned of_halves(unsigned x, unsigned y, unsigned z, const F& f) {
  float a[2], b[2], c[2];
  Pair<__half>::unpack(x, a[0], a[1]), Pair<__half>::unpack(y, b[0], b[1]), Pair<__half>::unpack(z, c[0], c[1]);
  return Pair<__half>::pack(static_cast<float>(f(double{a[0]}, double{b[0]}, double{c[0]})),
                            static_cast<float>(f(double{a[1]}, double{b[1]}, double{c[1]})));
}
inline unsigned sub_halves(unsigned x, unsigned y) {
  return of_halves(x, y, 0, [](double a, double b, double) { return a - b; });
}
inline unsigned mul_halves(unsigned x, unsigned y) {
  return of_halves(x, y, 0, [](double a, double b, double) { return a * b; });
}
inline unsigned fma_halves(unsigned x, unsigned y, unsigned z) {
  return of_halves(x, y, z, [](double a, double b, double c) { return a * b + c; });
}

inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.f : y;
}

inline unsigned shared_address(const void* p) { return emulator::shared_address(p); }
inline uint4 load_shared16(unsigned address) {
  return *static_cast<const uint4*>(emulator::shared_memory(address, 16, 16));
}
inline void store8(float* p, float x, float y) { p[0] = x, p[1] = y; }
inline void store8(std::byte* p, unsigned x, unsigned y) {
  reinterpret_cast<unsigned*>(p)[0] = x, reinterpret_cast<unsigned*>(p)[1] = y;
}
inline uint2 load_shared8(unsigned address) {
  return *static_cast<const uint2*>(emulator::shared_memory(address, 8, 8));
}
inline unsigned load_shared4(unsigned address) {
  return *static_cast<const unsigned*>(emulator::shared_memory(address, 4, 4));
}
inline void copy_async16(unsigned to, const void* from) { emulator::copy_async(to, from); }
inline void wait_copies() { emulator::wait_copies(); }
inline uint4 load_once16(const void* p) { return *static_cast<const uint4*>(p); }

struct MmaIn {
  float c[4];
  unsigned a[4], b[2];
};
struct MmaOut {
  float c[4];
};
// Tests with scores spend a tenth of their time here. A row of sums stays in registers: twice as fast.
template <class T>
void mma_warp(const MmaIn* in, MmaOut* out) {
  using Four = float __attribute__((vector_size(16)));
  alignas(64) float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, q = lane % 4;
    const MmaIn& l = in[lane];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const int row = g + 8 * (r % 2), k = 2 * q + 8 * (r / 2);
      Pair<T>::unpack(l.a[r], a[row][k], a[row][k + 1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) Pair<T>::unpack(l.b[r], b[2 * q + 8 * r][g], b[2 * q + 8 * r + 1][g]);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) c[g + 8 * (r / 2)][2 * q + r % 2] = l.c[r];
  }
  for (int i = 0; i < 16; ++i) {
    Four sums[2], row[2];
    std::memcpy(sums, c[i], sizeof sums);
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) {
      std::memcpy(row, b[k], sizeof row);
      sums[0] += a[i][k] * row[0];
      sums[1] += a[i][k] * row[1];
    }
    std::memcpy(c[i], sums, sizeof sums);
  }
  for (int lane = 0; lane < 32; ++lane) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) out[lane].c[r] = c[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
  }
}
template <class T>
void mma16816(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const MmaIn in = {{c[0], c[1], c[2], c[3]}, {a0, a1, a2, a3}, {b0, b1}};
  const MmaOut out = emulator::together<MmaOut>("mma", ~0u, in, [](const MmaIn* x, MmaOut* y) { mma_warp<T>(x, y); });
  std::copy_n(out.c, 4, c);
}

inline bool elect_lane() { return threadIdx.x % 32 == 0; }

struct ByteMmaIn {
  int c[4];
  unsigned a[4], b[2];
};
struct ByteMmaOut {
  int c[4];
};
inline void mma16832(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const ByteMmaIn in = {{c[0], c[1], c[2], c[3]}, {a0, a1, a2, a3}, {b0, b1}};
  const auto multiply = [](const ByteMmaIn* x, ByteMmaOut* y) {
    int a[16][32], b[32][8];
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int g = lane / 4, q = lane % 4;
        for (int r = 0; r < 4; ++r)
          a[g + 8 * (r % 2)][4 * q + i + 16 * (r / 2)] = static_cast<int>(x[lane].a[r] >> 8 * i & 0xffu);
        for (int r = 0; r < 2; ++r) b[4 * q + i + 16 * r][g] = static_cast<std::int8_t>(x[lane].b[r] >> 8 * i & 0xffu);
      }
    for (int lane = 0; lane < 32; ++lane)
      for (int r = 0; r < 4; ++r) {
        int sum = x[lane].c[r];
        for (int k = 0; k < 32; ++k) sum += a[lane / 4 + 8 * (r / 2)][k] * b[k][2 * (lane % 4) + r % 2];
        y[lane].c[r] = sum;
      }
  };
  const ByteMmaOut out = emulator::together<ByteMmaOut>("mma of bytes", ~0u, in, multiply);
  std::copy_n(out.c, 4, c);
}

struct FourWords {
  unsigned x[4];
};
inline void load_transposed(unsigned address, unsigned (&to)[4]) {
  const FourWords out = emulator::together<FourWords>("ldmatrix", ~0u, address, [](const unsigned* at, FourWords* y) {
    for (int m = 0; m < 4; ++m)
      for (int row = 0; row < 8; ++row) {
        std::uint16_t elements[8];
        std::memcpy(elements, emulator::shared_memory(at[8 * m + row], 16, 16), 16);
        for (int column = 0; column < 8; ++column) {
          unsigned& word = y[4 * column + row / 2].x[m];
          word = row % 2 ? word | static_cast<unsigned>(elements[column]) << 16 : elements[column];
        }
      }
  });
  std::copy_n(out.x, 4, to);
}

inline unsigned transpose8x8(unsigned x) {
  return emulator::together<unsigned>("movmatrix", ~0u, x, [](const unsigned* in, unsigned* out) {
    const auto element = [&](int row, int column) { return in[row * 4 + column / 2] >> column % 2 * 16 & 0xffffu; };
    for (int i = 0; i < 32; ++i) out[i] = element(i % 4 * 2, i / 4) | element(i % 4 * 2 + 1, i / 4) << 16;
  });
}

inline std::uint64_t operand_of(unsigned shared) { return shared; }
inline void start_products() {}
inline void commit_products() {}
inline void wait_products(float (&)[64]) {}
// Sixteen elements of a row.
template <class T>
void operand_row(std::uint64_t operand, int row, float (&x)[16]) {
  const unsigned at = static_cast<unsigned>(operand) + static_cast<unsigned>(row) * 128;
  for (unsigned piece = 0; piece < 2; ++piece) {
    const unsigned linear = at + piece * 16, place = linear ^ (linear >> 7 & 7) << 4;
    const auto* words = static_cast<const unsigned*>(emulator::shared_memory(place, 16, 16));
    for (unsigned i = 0; i < 4; ++i) Pair<T>::unpack(words[i], x[piece * 8 + 2 * i], x[piece * 8 + 2 * i + 1]);
  }
}
template <class T>
void mma_rows(float (&c)[64], std::uint64_t a, std::uint64_t b, bool adds) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  float rows[2][16], column[16];
  for (int r = 0; r < 2; ++r) operand_row<T>(a, 16 * warp + lane / 4 + 8 * r, rows[r]);
  for (int i = 0; i < 16; ++i)
    for (int h = 0; h < 2; ++h) {
      operand_row<T>(b, 8 * i + 2 * (lane % 4) + h, column);
      for (int r = 0; r < 2; ++r) {
        float sum = adds ? c[4 * i + 2 * r + h] : 0;
        for (int k = 0; k < 16; ++k) sum += rows[r][k] * column[k];
        c[4 * i + 2 * r + h] = sum;
      }
    }
}

inline void wait_for_value(const int* p, int x) {
  while (*static_cast<const volatile int*>(p) < x) emulator::wait_for_others();
}
inline void fetch_line(const void*) {}

inline void barrier_init(unsigned barrier, unsigned arrivals) { emulator::barrier_init(barrier, arrivals); }
inline int add_released(int* p, int x) { return atomicAdd(p, x); }

inline void barrier_init_fence() { emulator::pause(); }
inline void before_bulk_copies() {}
inline void barrier_expect(unsigned barrier, unsigned bytes) { emulator::barrier_expect(barrier, bytes); }
inline void barrier_arrive(unsigned barrier) { emulator::barrier_arrive(barrier); }
inline void barrier_wait(unsigned barrier, unsigned parity) { emulator::barrier_wait(barrier, parity); }
inline void arrive_after_copies(unsigned barrier) {
  emulator::wait_copies();
  emulator::barrier_arrive(barrier);
}

inline std::uint64_t read_once_policy() { return 0; }
inline void bulk_copy_2d(unsigned to, const void* map, int x, int y, unsigned barrier) {
  emulator::bulk_copy(to, static_cast<const CUtensorMap*>(map)->box, x, y, barrier);
}
inline void bulk_copy_2d(unsigned to, const void* map, int x, int y, unsigned barrier, std::uint64_t) {
  bulk_copy_2d(to, map, x, y, barrier);
}

inline void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  emulator::bulk_load(to, from, bytes, barrier);
}
inline void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier, std::uint64_t) {
  bulk_load(to, from, bytes, barrier);
}
inline void bulk_store(void* to, unsigned from, unsigned bytes) { emulator::bulk_store(to, from, bytes); }
inline void commit_stores() { emulator::commit_stores(); }
template <int Left>
void wait_stores_read() {
  emulator::wait_stores(Left, false);
}
inline void wait_stores() { emulator::wait_stores(0, true); }

inline void keep_load(int) {}
inline void fetch_map(const void*) {}
inline void wait_for_predecessor() { emulator::waited_for_predecessor(); }
inline void let_successor_start() {}

}  // namespace kvlab::cuda
