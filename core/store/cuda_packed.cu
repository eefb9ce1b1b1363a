// A warp copies a page at a time through two buffers of shared memory: the next page that comes up is on its way while
// this one is unpacked. A page that goes down is packed from one buffer into the other.
#include "store/cuda_packed.hpp"

#include <algorithm>

#include "base/relay.cuh"
#include "ops/page/packed.hpp"
#include "store/cuda_head.cuh"
#include "store/cuda_kernels.hpp"

namespace kvlab::device_store {
using namespace cuda;
namespace {

constexpr int most_warps = 8, most_buffers = 2 * most_warps;
constexpr unsigned all_bytes = 0x01010101u;

// Four numbers of bf16 as bytes: their exponents, and sign and mantissa.
struct Four {
  unsigned exponents, rest;

  __device__ static Four of(unsigned a, unsigned b) {
    const unsigned high = __byte_perm(a, b, 0x7531), low = __byte_perm(a, b, 0x6420);
    return {(high << 1 & 0xfefefefeu) | (low >> 7 & all_bytes), (high & 0x80808080u) | (low & 0x7f7f7f7fu)};
  }
  __device__ uint2 numbers() const {
    const unsigned high = (rest & 0x80808080u) | (exponents >> 1 & 0x7f7f7f7fu),
                   low = (exponents << 7 & 0x80808080u) | (rest & 0x7f7f7f7fu);
    return {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
  }
};

// The sum of `mine`, 0 to 8, over the lanes before this one; `all` gets the warp's.
__device__ __forceinline__ int escapes_before(int mine, int& all) {
  const unsigned before = (1u << (threadIdx.x % 32)) - 1;
  int sum = 0;
  all = 0;
#pragma unroll
  for (int bit = 0; bit < 4; ++bit) {
    const unsigned lanes = __ballot_sync(~0u, mine >> bit & 1);
    sum += __popc(lanes & before) << bit, all += __popc(lanes) << bit;
  }
  return sum;
}

// The base that ops::pack_page takes. The whole warp calls it. side: 16 bytes hold 8 numbers.
__device__ unsigned base_of(const uint4* side, int groups, int lane) {
  const auto for_exponents = [&](const auto& f) {
    for (int g = lane; g < groups; g += 32) {
      const uint4 x = side[g];
      for (const unsigned four : {Four::of(x.x, x.y).exponents, Four::of(x.z, x.w).exponents})
#pragma unroll
        for (int i = 0; i < 4; ++i) f(four >> 8 * i & 0xffu);
    }
  };
  unsigned most = 0;
  for_exponents([&](unsigned e) { most = max(most, e); });
  most = __reduce_max_sync(~0u, most);
  constexpr int counted = ops::packed_bases + int{ops::packed_escape} - 1;  // exponents below the greatest that matter
  static_assert(counted <= 16);
  unsigned count = 0;  // lane i counts exponents of most - i
  for (int begin = 0; begin < groups; begin += 32) {
    unsigned long long packed[2] = {};  // of this lane's 8 numbers: counts of 8 bits
    if (begin + lane < groups) {
      const uint4 x = side[begin + lane];
      for (const unsigned four : {Four::of(x.x, x.y).exponents, Four::of(x.z, x.w).exponents})
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned below = most - (four >> 8 * i & 0xffu);
          if (below < 8)
            packed[0] += 1ull << 8 * below;
          else if (below < 16)
            packed[1] += 1ull << 8 * (below - 8);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // 32 lanes of at most 8 make 256: counts of 16 bits.
      const auto four = static_cast<unsigned>(packed[i / 2] >> 32 * (i % 2));
      const unsigned even = __reduce_add_sync(~0u, four & 0x00ff00ffu),
                     odd = __reduce_add_sync(~0u, four >> 8 & 0x00ff00ffu);
      if (lane / 4 == i) count += (lane % 2 ? odd : even) >> 16 * (lane % 4 / 2) & 0xffffu;
    }
  }
  unsigned coded = 0;  // of the base most - lane
  for (int i = 0; i < int{ops::packed_escape}; ++i) {
    const unsigned of = __shfl_sync(~0u, count, (lane + i) % 32);
    coded += lane + i < 16 ? of : 0;
  }
  const bool may = lane < ops::packed_bases && lane <= static_cast<int>(most);
  const unsigned best = __reduce_max_sync(~0u, may ? coded : 0);
  const int first = __ffs(static_cast<int>(__ballot_sync(~0u, may && coded == best))) - 1;
  return max(most - static_cast<unsigned>(first), ops::packed_escape - 1);
}

// As ops::pack_page, by a warp, between buffers of shared memory.
__device__ int pack(const std::byte* frame, const PageLayout& l, std::byte* to, int lane) {
  const ops::PackedPlaces at(l);
  const int groups = static_cast<int>(at.numbers / 8);
  for (int i = lane; i < static_cast<int>(at.tail / 16); i += 32)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(frame + l.positions)[i];
  const std::int64_t room = l.bytes - at.exponents;
  int escaped = 0;
  ops::PackedHead head;
  for (int s = 0; s < 2; ++s) {
    const auto* side = reinterpret_cast<const uint4*>(frame + (s == 0 ? l.k : l.v));
    const unsigned base = base_of(side, groups, lane);
    const int before_side = escaped;
    for (int begin = 0; begin < groups; begin += 32) {
      const int g = begin + lane;
      unsigned low = 0, high = 0, escapes = 0;
      Four two[2] = {};
      if (g < groups) {
        const uint4 x = side[g];
        two[0] = Four::of(x.x, x.y), two[1] = Four::of(x.z, x.w);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const unsigned code = min(base - (two[i / 4].exponents >> 8 * (i % 4) & 0xffu), ops::packed_escape);
          low |= (code & 3u) << 2 * i, high |= code >> 2 << i;
          escapes |= static_cast<unsigned>(code == ops::packed_escape) << i;
        }
        *reinterpret_cast<uint2*>(to + at.rest[s] + 8 * g) = {two[0].rest, two[1].rest};
        *reinterpret_cast<unsigned short*>(to + at.low[s] + 2 * g) = static_cast<unsigned short>(low);
        to[at.high[s] + g] = static_cast<std::byte>(high);
      }
      int all;
      int mine = escaped + escapes_before(__popc(escapes), all);
      if (escaped + all > room) return 0;
      for (; escapes; escapes &= escapes - 1, ++mine) {
        const int i = __ffs(static_cast<int>(escapes)) - 1;
        to[at.exponents + mine] = static_cast<std::byte>(two[i / 4].exponents >> 8 * (i % 4));
      }
      escaped += all;
    }
    head.base[s] = static_cast<std::uint8_t>(base), head.escaped[s] = escaped - before_side;
  }
  if (lane == 0) *reinterpret_cast<ops::PackedHead*>(to + at.tail) = head;
  const int units = ops::packed_units(l, escaped);
  // What fills the last unit crosses too.
  for (std::int64_t i = at.exponents + escaped + lane; i < units * ops::packed_unit(l); i += 32) to[i] = std::byte{};
  return units;
}

// Codes of 4 numbers, a byte each: 8 bits of the low ones, 4 of the high ones.
__device__ __forceinline__ unsigned codes_of(unsigned low, unsigned high) {
  low = (low | low << 12) & 0x000f000fu;
  low = (low | low << 6) & 0x03030303u;
  return low | (high * 0x00204081u & all_bytes) << 2;
}

// As ops::unpack_page, by a warp, from shared memory to a frame.
__device__ void unpack(const std::byte* packed, const PageLayout& l, std::byte* frame, int lane) {
  const ops::PackedPlaces at(l);
  const int groups = static_cast<int>(at.numbers / 8);
  const ops::PackedHead head = *reinterpret_cast<const ops::PackedHead*>(packed + at.tail);
  for (int i = lane; i < static_cast<int>(at.tail / 16); i += 32)
    reinterpret_cast<uint4*>(frame + l.positions)[i] = reinterpret_cast<const uint4*>(packed)[i];
  const std::byte* exponents = packed + at.exponents;
  for (int s = 0; s < 2; ++s) {
    auto* side = reinterpret_cast<uint4*>(frame + (s == 0 ? l.k : l.v));
    const unsigned base = head.base[s] * all_bytes;
#pragma unroll 2
    for (int begin = 0; begin < groups; begin += 32) {
      const int g = begin + lane;
      uint2 rest = {};
      unsigned e[2] = {}, escapes[2] = {};
      if (g < groups) {
        rest = *reinterpret_cast<const uint2*>(packed + at.rest[s] + 8 * g);
        const unsigned low = *reinterpret_cast<const unsigned short*>(packed + at.low[s] + 2 * g),
                       high = static_cast<unsigned>(packed[at.high[s] + g]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned codes = codes_of(low >> 8 * i & 0xffu, high >> 4 * i & 0xfu);
          escapes[i] = codes & codes >> 1 & codes >> 2 & all_bytes;
          e[i] = base - (codes - escapes[i]);  // the base is 6 at least, so no byte borrows
        }
      }
      int all, mine = escapes_before(__popc(escapes[0]) + __popc(escapes[1]), all);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        for (unsigned left = escapes[i]; left; left &= left - 1, ++mine) {
          const int bit = __ffs(static_cast<int>(left)) - 1;  // of its byte
          e[i] = (e[i] & ~(0xffu << bit)) | static_cast<unsigned>(exponents[mine]) << bit;
        }
      exponents += all;
      if (g >= groups) continue;
      const uint2 a = Four{e[0], rest.x}.numbers(), b = Four{e[1], rest.y}.numbers();
      side[g] = {a.x, a.y, b.x, b.y};
    }
  }
}

__global__ void __launch_bounds__(most_warps * 32)
    packing_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ PackingJobs j) {
  extern __shared__ uint4 buffers[];
  __shared__ std::uint64_t barriers[most_buffers];
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, blocks = static_cast<int>(gridDim.x);
  const PageLayout& l = s.layout;
  const int count = j.counts[0], step = blocks * warps;
  const auto frame_bytes = static_cast<unsigned>(l.bytes);
  const auto buffer = [&](int b) { return reinterpret_cast<std::byte*>(buffers) + (2 * warp + b) * l.bytes; };
  const unsigned barrier[] = {shared_address(&barriers[2 * warp]), shared_address(&barriers[2 * warp + 1])};
  if (lane == 0) {
    for (const unsigned b : barrier) barrier_init(b, 1);
    barrier_init_fence();
  }
  __syncwarp();

  const auto job_at = [&](int i) { return reinterpret_cast<const int4*>(j.jobs)[i]; };
  const auto entry_of = [&](const int4& job) { return s.host_entries + job.w; };
  const auto is_up = [](const int4& job) { return job.x == CudaStorePlace::up; };
  // Starts to load what a job reads.
  const auto load = [&](const int4& job, int b) {
    if (lane != 0 || job.x == CudaStorePlace::leave) return;
    const std::int64_t bytes = is_up(job) ? ops::packed_bytes(l, *entry_of(job)) : l.bytes;
    before_bulk_copies();
    barrier_expect(barrier[b], static_cast<unsigned>(bytes));
    bulk_load(shared_address(buffer(b)), frame_at(s, is_up(job) ? 1 : 0, job.y), static_cast<unsigned>(bytes),
              barrier[b]);
  };
  const auto store = [&](std::byte* to, const std::byte* from, unsigned bytes) {
    before_bulk_copies();
    __syncwarp();
    if (lane == 0) bulk_store(to, shared_address(from), bytes), commit_stores(), wait_stores();
    __syncwarp();
  };

  unsigned phases = 0, spared[2] = {};
  int turn = 0;
  bool loaded = false;  // the current job's load is under way
  for (int i = static_cast<int>(blockIdx.x) + blocks * warp; i < count; i += step, turn ^= 1) {
    const int4 job = job_at(i);
    if (!loaded) load(job, turn);
    // A page that goes down needs the other buffer for itself.
    loaded = is_up(job) && i + step < count;
    if (loaded) load(job_at(i + step), turn ^ 1);
    if (job.x != CudaStorePlace::leave) {
      barrier_wait(barrier[turn], phases >> turn & 1);
      phases ^= 1u << turn;
      __syncwarp();
      const std::byte* got = buffer(turn);
      PageEntry* lower = entry_of(job);
      if (is_up(job)) {
        std::byte* to = frame_at(s, 0, job.z);
        if (lower->packed) {
          unpack(got, l, to, lane);
          spared[0] += static_cast<unsigned>((l.bytes - ops::packed_bytes(l, *lower)) / 16);
        } else {
          store(to, got, frame_bytes);
        }
      } else {
        const int units = lower->tokens == l.page_size ? pack(got, l, buffer(turn ^ 1), lane) : 0;
        const std::int64_t bytes = units ? units * ops::packed_unit(l) : l.bytes;
        store(frame_at(s, 1, job.z), units ? buffer(turn ^ 1) : got, static_cast<unsigned>(bytes));
        spared[1] += static_cast<unsigned>((l.bytes - bytes) / 16);
        if (lane == 0) lower->packed = static_cast<std::uint8_t>(units);
      }
    }
    __syncwarp();
    if (lane == 0 && (job.x == CudaStorePlace::leave || job.x == CudaStorePlace::down_and_leave))
      give_frame_back(s, job.y);
  }
  if (lane == 0)
    for (int to = 0; to < 2; ++to)
      if (spared[to]) atomicAdd(&s.counters->spared[to], static_cast<unsigned long long>(spared[to]));
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (j.beside)
    end_copies(j.counts);
  else if (blockIdx.x == 0 && count > 0)
    atomicAdd(&s.counters->moved[j.to], static_cast<unsigned long long>(count));
}

}  // namespace

void copy_packing(const CudaStoreLayer& s, const PackingJobs& j, int blocks, Stream stream) {
  const auto buffers = static_cast<std::int64_t>(sizeof(RelayShared)) / s.layout.bytes;
  const int warps = static_cast<int>(std::clamp<std::int64_t>(buffers / 2, 1, most_warps));
  launch_apart("copy_packing", packing_kernel, blocks, warps * 32, stream, s, j);
}

}  // namespace kvlab::device_store
