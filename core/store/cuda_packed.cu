// A team of warps copies a page at a time through two buffers of shared memory: the next page that comes up is on its
// way while this one is unpacked, by a warp for each half of its keys and of its values. A page that goes down is
// packed by the first warp, from one buffer into the other.
#include "base/lanes.cuh"
#include "store/cuda_packed.hpp"

#include <algorithm>

#include "base/relay.cuh"
#include "ops/page/packed.hpp"
#include "store/cuda_head.cuh"
#include "store/cuda_kernels.hpp"

namespace kvlab::device_store {
using namespace cuda;
namespace {

constexpr int team = 4;  // warps, as many as PackedHead::escaped counts
constexpr int most_teams = 8, most_buffers = 2 * most_teams;
constexpr int batch = 4;  // groups of 8 numbers that a lane has in hand
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
    head.base[s] = static_cast<std::uint8_t>(base);
    const int half = static_cast<int>(at.half / 8);
    for (int begin = 0; begin < groups; begin = begin + 32 < half || begin >= half ? begin + 32 : half) {
      const int g = begin + lane, end = begin < half ? half : groups;
      unsigned low = 0, high = 0, escapes = 0;
      Four two[2] = {};
      if (g < end) {
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
      head.escaped[2 * s + (begin < half ? 0 : 1)] += static_cast<std::uint16_t>(all);
    }
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

// Puts exponents of their own in place of those that `escapes`, a bit of each byte, names. They begin at packed + at.
__device__ __forceinline__ unsigned with_own(unsigned exponents, unsigned escapes, const std::byte* packed, int at) {
  const unsigned* words = reinterpret_cast<const unsigned*>(packed) + at / 4;
  const auto four = static_cast<unsigned>((std::uint64_t{words[1]} << 32 | words[0]) >> 8 * (at % 4));
  const unsigned before = escapes * 0x01010100u,  // a byte counts the escapes before it
      which = __byte_perm(before | before >> 4, 0, 0x4420), mask = escapes * 0xffu;
  return (exponents & ~mask) | (__byte_perm(four, 0, which) & mask);
}

// As ops::unpack_page, from shared memory to a frame, by a team of warps. Each has its part: a half of a side.
__device__ void unpack(const std::byte* packed, const PageLayout& l, std::byte* frame, int part, int lane) {
  const ops::PackedPlaces at(l);
  const ops::PackedHead head = *reinterpret_cast<const ops::PackedHead*>(packed + at.tail);
  if (part == 0)
    for (int i = lane; i < static_cast<int>(at.tail / 16); i += 32)
      reinterpret_cast<uint4*>(frame + l.positions)[i] = reinterpret_cast<const uint4*>(packed)[i];
  const bool values = part >= 2;
  const int half = static_cast<int>(at.half / 8), first = part % 2 ? half : 0,
            end = part % 2 ? static_cast<int>(at.numbers / 8) : half;
  int own = static_cast<int>(at.exponents);
#pragma unroll
  for (int i = 0; i + 1 < team; ++i) own += i < part ? int{head.escaped[i]} : 0;
  const unsigned base = (values ? head.base[1] : head.base[0]) * all_bytes;
  auto* side = reinterpret_cast<uint4*>(frame + (values ? l.v : l.k));
  const auto* rests = reinterpret_cast<const uint2*>(packed + at.rest[values]);
  const auto* lows = reinterpret_cast<const unsigned short*>(packed + at.low[values]);
  const std::byte* highs = packed + at.high[values];
  for (int begin = first; begin < end; begin += 32 * batch) {
    uint2 rest[batch];
    unsigned e[batch][2], escapes[batch][2], counts = 0;  // counts: a byte for each group
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      const int g = begin + 32 * u + lane;
      unsigned low = 0, high = 0;
      rest[u] = {};
      if (g < end) rest[u] = rests[g], low = lows[g], high = static_cast<unsigned>(highs[g]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned codes = codes_of(low >> 8 * i & 0xffu, high >> 4 * i & 0xfu);
        escapes[u][i] = codes & codes >> 1 & codes >> 2 & all_bytes;
        e[u][i] = base - (codes - escapes[u][i]);  // the base is 6 at least, so no byte borrows
      }
      counts |= static_cast<unsigned>(__popc(escapes[u][0] | escapes[u][1] << 1)) << 8 * u;
    }
    // 31 lanes of at most 8 fit into a byte.
    unsigned before = __shfl_up_sync(~0u, counts, 1);
    if (lane == 0) before = 0;
    before = sum_through_lane(before);
    const unsigned before_last = __shfl_sync(~0u, before, 31), of_last = __shfl_sync(~0u, counts, 31);
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      const int g = begin + 32 * u + lane, mine = own + static_cast<int>(before >> 8 * u & 0xffu);
      own += static_cast<int>((before_last >> 8 * u & 0xffu) + (of_last >> 8 * u & 0xffu));
      e[u][0] = with_own(e[u][0], escapes[u][0], packed, mine);
      e[u][1] = with_own(e[u][1], escapes[u][1], packed, mine + __popc(escapes[u][0]));
      if (g >= end) continue;
      const uint2 a = Four{e[u][0], rest[u].x}.numbers(), b = Four{e[u][1], rest[u].y}.numbers();
      side[g] = {a.x, a.y, b.x, b.y};
    }
  }
}

__global__ void __launch_bounds__(most_teams* team * 32)
    packing_kernel(const __grid_constant__ CudaStoreLayer s, const __grid_constant__ PackingJobs j) {
  extern __shared__ uint4 buffers[];
  __shared__ std::uint64_t full[most_buffers], read[most_buffers];  // a team's two; `read` by all its warps
  const int warp = static_cast<int>(threadIdx.x) / 32, part = warp % team, mine = warp / team,
            teams = static_cast<int>(blockDim.x) / (32 * team), lane = static_cast<int>(threadIdx.x) % 32,
            blocks = static_cast<int>(gridDim.x);
  const bool leads = part == 0;
  const PageLayout& l = s.layout;
  const int count = j.counts[0], step = blocks * teams;
  const auto frame_bytes = static_cast<unsigned>(l.bytes);
  const auto buffer = [&](int b) { return reinterpret_cast<std::byte*>(buffers) + (2 * mine + b) * l.bytes; };
  const auto full_at = [&](int b) { return shared_address(&full[2 * mine + b]); };
  const auto read_at = [&](int b) { return shared_address(&read[2 * mine + b]); };
  if (leads && lane == 0) {
    for (int b = 0; b < 2; ++b) barrier_init(full_at(b), 1), barrier_init(read_at(b), team);
    barrier_init_fence();
  }
  __syncthreads();

  const auto job_at = [&](int i) { return reinterpret_cast<const int4*>(j.jobs)[i]; };
  const auto entry_of = [&](const int4& job) { return s.host_entries + job.w; };
  const auto is_up = [](const int4& job) { return job.x == CudaStorePlace::up; };
  // Starts to load what a job reads.
  const auto load = [&](const int4& job, int b) {
    if (!leads || lane != 0 || job.x == CudaStorePlace::leave) return;
    const std::int64_t bytes = is_up(job) ? ops::packed_bytes(l, *entry_of(job)) : l.bytes;
    before_bulk_copies();
    barrier_expect(full_at(b), static_cast<unsigned>(bytes));
    bulk_load(shared_address(buffer(b)), frame_at(s, is_up(job) ? 1 : 0, job.y), static_cast<unsigned>(bytes),
              full_at(b));
  };
  const auto store = [&](std::byte* to, const std::byte* from, unsigned bytes) {
    before_bulk_copies();
    __syncwarp();
    if (lane == 0) bulk_store(to, shared_address(from), bytes), commit_stores(), wait_stores();
    __syncwarp();
  };

  unsigned phases = 0, spared[2] = {};
  bool loaded = false;  // the current job's load is under way
  int done = 0;         // jobs of this team that took a buffer
  for (int i = static_cast<int>(blockIdx.x) + blocks * mine; i < count; i += step) {
    const int turn = done % 2;
    const int4 job = job_at(i);
    // It takes no buffer: nothing would hold the other warps, which could be two phases of `read` ahead.
    if (job.x == CudaStorePlace::leave) {
      if (leads && lane == 0) give_frame_back(s, job.y);
      loaded = false;
      continue;
    }
    if (!loaded) load(job, turn);
    // The job before has been read out of the other buffer.
    if (leads && done > 0) barrier_wait(read_at(turn ^ 1), static_cast<unsigned>((done - 1) / 2 % 2));
    // A page that goes down needs the other buffer for itself.
    loaded = is_up(job) && i + step < count;
    if (loaded) load(job_at(i + step), turn ^ 1);
    barrier_wait(full_at(turn), phases >> turn & 1);
    phases ^= 1u << turn;
    __syncwarp();
    const std::byte* got = buffer(turn);
    PageEntry* lower = entry_of(job);
    if (is_up(job)) {
      std::byte* to = frame_at(s, 0, job.z);
      if (lower->packed) {
        unpack(got, l, to, part, lane);
        spared[0] += static_cast<unsigned>((l.bytes - ops::packed_bytes(l, *lower)) / 16);
      } else if (leads) {
        store(to, got, frame_bytes);
      }
    } else if (leads) {
      const int units = lower->tokens == l.page_size ? pack(got, l, buffer(turn ^ 1), lane) : 0;
      const std::int64_t bytes = units ? units * ops::packed_unit(l) : l.bytes;
      store(frame_at(s, 1, job.z), units ? buffer(turn ^ 1) : got, static_cast<unsigned>(bytes));
      spared[1] += static_cast<unsigned>((l.bytes - bytes) / 16);
      if (lane == 0) lower->packed = static_cast<std::uint8_t>(units);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(read_at(turn));
    if (leads && lane == 0 && job.x == CudaStorePlace::down_and_leave) give_frame_back(s, job.y);
    ++done;
  }
  if (leads && lane == 0)
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
  constexpr std::int64_t room =
      std::int64_t{sizeof(RelayShared)} - 16;  // exponents are read a word further than they go
  static_assert(2 * ops::most_packable <= room);
  const auto buffers = room / s.layout.bytes;
  const int teams = static_cast<int>(std::clamp<std::int64_t>(buffers / 2, 1, most_teams));
  launch_apart("copy_packing", packing_kernel, blocks, teams * team * 32, stream, s, j);
}

}  // namespace kvlab::device_store
