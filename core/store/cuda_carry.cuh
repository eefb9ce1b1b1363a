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
// read the host. plain: the host has codes by token, and the device numbers of 16 bits.
struct CarryRoom {
  int warps = carrying_warps, ahead = 0;
  unsigned bytes = 0;  // of a page on the host, which granule_bytes divides
  bool plain = false;
};

constexpr unsigned carry_barriers = carrying_warps * carried_ahead * sizeof(std::uint64_t);

inline CarryRoom carry_room(const PageLayout& device, const PageLayout& host) {
  CarryRoom r;
  const auto coded = [](CodecSide s) { return s.bits && !s.grouped(); };
  r.plain = coded(host.codec.k) && coded(host.codec.v) && device.codec.k.bits == 0 && device.codec.v.bits == 0 &&
            device.dtype != DType::f32 && device.head_dim <= 128 && device.head_dim % lane_elements == 0;
  r.bytes = static_cast<unsigned>(host.bytes);
  const int stages = static_cast<int>((sizeof(cuda::RelayShared) - carry_barriers) / r.bytes);
  if (stages < 2) return r;
  r.warps = std::min(carrying_warps, stages / 2);
  r.ahead = std::min(carried_ahead, stages / r.warps);
  return r;
}

// What 4 bytes of a token hold: its position, and its state.
__device__ inline void copy_fields(const std::byte* from, const PageLayout& of, std::byte* to, const PageLayout& as,
                                   int tokens, int lane) {
  const auto copy = [&](std::int64_t source, std::int64_t target) {
    const auto* x = reinterpret_cast<const unsigned*>(from + source);
    auto* y = reinterpret_cast<unsigned*>(to + target);
    for (int t = lane; t < tokens; t += 32) y[t] = x[t];
  };
  copy(of.positions, as.positions);
  for (int column = 0; column < of.state_columns; ++column) {
    const std::int64_t skip = std::int64_t{column} * of.page_size * 4;
    copy(of.state + skip, as.state + skip);
  }
}

// Decodes rows of one side that lie one behind the other. Bits: 0 = e4m3. T: of the numbers.
template <int Bits, class T>
__device__ __forceinline__ void decode_rows(const std::byte* codes, const std::byte* meta, std::byte* to, int rows,
                                            int head_dim, int lane) {
  constexpr CodecSide side = {Bits ? Bits : 8, Bits ? CodeKind::integer : CodeKind::e4m3};
  constexpr int batch = 4, bytes = side.bits;  // of a lane's codes
  const int of_row = head_dim / lane_elements, units = rows * of_row;
  for (int first = lane; first < units; first += 32 * batch) {
    LaneWords words[batch];
    unsigned scale[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      const int i = min(first + 32 * u, units - 1);
      words[u].load(codes + i * bytes, bytes);
      scale[u] = reinterpret_cast<const unsigned*>(meta)[i / of_row];
    }
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      const int i = first + 32 * u;
      float x[lane_elements];
      numbers_of(words[u], side, DType::bf16, scale[u], x);
      if (i < units)
        reinterpret_cast<uint4*>(to)[i] = make_uint4(cuda::Pair<T>::pack(x[0], x[1]), cuda::Pair<T>::pack(x[2], x[3]),
                                                     cuda::Pair<T>::pack(x[4], x[5]), cuda::Pair<T>::pack(x[6], x[7]));
    }
  }
}

// Of CarryRoom::plain: a warp decodes the first tokens of a page in shared memory.
__device__ inline void decode_page(const std::byte* from, const PageLayout& of, std::byte* to, const PageLayout& as,
                                   int tokens, int lane) {
  copy_fields(from, of, to, as, tokens, lane);
  for (const bool key : {true, false}) {
    const CodecSide side = ops::side_of(of, key);
    const auto rows = [&](auto bits, auto number) {
      decode_rows<bits, decltype(number)>(from + ops::row_offset(of, key, 0), from + ops::meta_offset(of, key, 0),
                                          to + ops::row_offset(as, key, 0), tokens, of.head_dim, lane);
    };
    const auto decode = [&](auto number) {
      if (side.kind == CodeKind::e4m3) return rows(std::integral_constant<int, 0>{}, number);
      if (side.bits == 8) return rows(std::integral_constant<int, 8>{}, number);
      if (side.bits == 4) return rows(std::integral_constant<int, 4>{}, number);
      rows(std::integral_constant<int, 2>{}, number);
    };
    as.dtype == DType::f16 ? decode(__half{}) : decode(__nv_bfloat16{});
  }
}

// The other way: from a page on the device to one in shared memory. All of it crosses the link, so it is 0 where no
// token is.
__device__ inline void encode_page(const std::byte* from, const PageLayout& of, std::byte* to, const PageLayout& as,
                                   int tokens, int lane) {
  if (tokens < as.page_size) {
    for (int i = lane; i < static_cast<int>(as.bytes / 16); i += 32) reinterpret_cast<uint4*>(to)[i] = uint4{};
    __syncwarp();
  }
  copy_fields(from, of, to, as, tokens, lane);
  const RowLanes at(of.head_dim, lane);
  const bool key = at.key(0);
  const std::byte* mine = from + ops::row_offset(of, key, 0) + at.first * 2;
  constexpr int batch = 4;
  for (int first = 0; first < tokens; first += batch) {
    LaneWords words[batch] = {};
#pragma unroll
    for (int i = 0; i < batch; ++i)
      if (at.there && first + i < tokens) words[i].load(mine + (first + i) * of.head_dim * 2, 16);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (first + i >= tokens) break;
      RowParts<1> row = {{}, at.first, 0, at.there};
      numbers_of(words[i], {}, of.dtype, 0, row.x[0]);
      encode(to, as, key, first + i, row, at.lanes);
    }
  }
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
  const auto stage_of = [&](int turn) { return stages + static_cast<std::size_t>(turn % room.ahead) * room.bytes; };
  const auto ask = [&](int turn) {  // of one thread
    if (first + turn * all >= count) return;
    const int4 job = job_of(turn);
    if (job.x != CudaStorePlace::up) return;
    const unsigned barrier = cuda::shared_address(loaded + turn % room.ahead);
    cuda::before_bulk_copies();
    cuda::barrier_expect(barrier, room.bytes);
    cuda::bulk_load(cuda::shared_address(stage_of(turn)), frame_at(s, 1, job.y), room.bytes, barrier);
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
    const PageLayout &above = layout_of(s, 0), &below = layout_of(s, 1);
    if (job.x == CudaStorePlace::up && room.ahead > 0) {
      const int at = turn % room.ahead;
      cuda::barrier_wait(cuda::shared_address(loaded + at), parity >> at & 1u);
      parity ^= 1u << at;
      std::byte* to = frame_at(s, 0, job.z);
      if (room.plain)
        decode_page(stage_of(turn), below, to, above, job.w, lane);
      else
        carry_tokens(stage_of(turn), below, to, above, job.w, lane);
    } else if (job.x != CudaStorePlace::leave && job.x != CudaStorePlace::up && room.plain && room.ahead > 0) {
      // Its stage holds no page that was asked for.
      encode_page(frame_at(s, 0, job.y), above, stage_of(turn), below, job.w, lane);
      cuda::before_bulk_copies();
      __syncwarp();
      if (lane == 0) {
        cuda::bulk_store(frame_at(s, 1, job.z), cuda::shared_address(stage_of(turn)), room.bytes);
        cuda::commit_stores();
        cuda::wait_stores_read<0>();
      }
    } else if (job.x != CudaStorePlace::leave) {
      carry_page(s, job.x == CudaStorePlace::up ? 0 : 1, job.y, job.z, job.w, lane);
    }
    __syncwarp();
    if (lane != 0) continue;
    if (job.x == CudaStorePlace::leave || job.x == CudaStorePlace::down_and_leave) give_frame_back(s, job.y);
    if (room.ahead > 0) ask(turn + room.ahead);
  }
  if (lane == 0) cuda::wait_stores();
}

}  // namespace kvlab::device_store
