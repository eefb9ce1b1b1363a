// Copies of pages whose codec differs between the tiers. A page of the host comes whole, by a bulk copy through shared
// memory, and the warp that asked for it decodes it there. Warps ask for some pages ahead, so that a few
// multiprocessors suffice for the link's rate.
#pragma once
#include <algorithm>

#include "base/relay.cuh"
#include "store/cuda_tokens.cuh"

namespace kvlab::device_store {

constexpr int carrying_warps = 16, carried_ahead = 8;  // at most, of a block and of a warp

// How a block carries pages. ahead: pages that a warp has under way; 0 = a page is larger than shared memory, and warps
// read the host.
struct CarryRoom {
  int warps = carrying_warps, ahead = 0;
  unsigned bytes = 0;  // of a page on the host, which granule_bytes divides
};

constexpr unsigned carry_barriers = carrying_warps * carried_ahead * sizeof(std::uint64_t);

inline CarryRoom carry_room(const PageLayout& host) {
  CarryRoom r;
  r.bytes = static_cast<unsigned>(host.bytes);
  const int stages = static_cast<int>((sizeof(cuda::RelayShared) - carry_barriers) / r.bytes);
  if (stages < 2) return r;
  r.warps = std::min(carrying_warps, stages / 2);
  r.ahead = std::min(carried_ahead, stages / r.warps);
  return r;
}

// Blocks of room.warps warps that launch_apart launches. memory: their dynamic shared memory. jobs: as of
// CudaStorePlace. A page that leaves gives its frame back.
__device__ inline void carry_jobs(const CudaStoreLayer& s, const std::int32_t* jobs, int count, const CarryRoom& room,
                                  void* memory) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(blockIdx.x) * room.warps + warp, all = static_cast<int>(gridDim.x) * room.warps;
  auto* loaded = static_cast<std::uint64_t*>(memory) + warp * carried_ahead;
  std::byte* stages =
      static_cast<std::byte*>(memory) + carry_barriers + static_cast<std::size_t>(warp * room.ahead) * room.bytes;
  const auto job_of = [&](int turn) { return reinterpret_cast<const int4*>(jobs)[first + turn * all]; };
  const auto ask = [&](int turn) {  // of one thread
    if (first + turn * all >= count) return;
    const int4 job = job_of(turn);
    if (job.x != CudaStorePlace::up) return;
    const int at = turn % room.ahead;
    const unsigned barrier = cuda::shared_address(loaded + at);
    cuda::barrier_expect(barrier, room.bytes);
    cuda::bulk_load(cuda::shared_address(stages + static_cast<std::size_t>(at) * room.bytes), frame_at(s, 1, job.y),
                    room.bytes, barrier);
  };
  if (lane == 0 && room.ahead > 0) {
    for (int i = 0; i < room.ahead; ++i) cuda::barrier_init(cuda::shared_address(loaded + i), 1);
    cuda::barrier_init_fence();
    for (int turn = 0; turn < room.ahead; ++turn) ask(turn);
  }
  __syncwarp();
  unsigned parity = 0;  // a bit for each place
  for (int turn = 0; first + turn * all < count; ++turn) {
    const int4 job = job_of(turn);
    if (job.x == CudaStorePlace::up && room.ahead > 0) {
      const int at = turn % room.ahead;
      cuda::barrier_wait(cuda::shared_address(loaded + at), parity >> at & 1u);
      parity ^= 1u << at;
      carry_tokens(stages + static_cast<std::size_t>(at) * room.bytes, layout_of(s, 1), frame_at(s, 0, job.z),
                   layout_of(s, 0), job.w, lane);
    } else if (job.x != CudaStorePlace::leave) {
      carry_page(s, job.x == CudaStorePlace::up ? 0 : 1, job.y, job.z, job.w, lane);
    }
    __syncwarp();
    if (lane != 0) continue;
    if (job.x == CudaStorePlace::leave || job.x == CudaStorePlace::down_and_leave) give_frame_back(s, job.y);
    if (room.ahead > 0) ask(turn + room.ahead);
  }
}

}  // namespace kvlab::device_store
