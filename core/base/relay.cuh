// Copies from global or pinned memory to either, through shared memory, by bulk copies. One thread keeps many pieces
// under way, so that a few multiprocessors suffice for the link's rate. A block takes nearly all shared memory of its
// multiprocessor, so that no kernel of a decode step shares it (core/bench/RESULTS.md says what that is worth).
#pragma once
#include <utility>

#include "base/launch.cuh"

namespace kvlab::cuda {

constexpr int relay_piece = 4224, relay_stages = 46;  // most bytes of a piece
// Pieces of a block that are on their way at once: beside a decode step, and where the stream waits for them. With more
// of them a step's own reads of the host come later; fewer do not fill the link.
constexpr unsigned relay_beside = 16, relay_awaited = relay_stages - 2;

struct RelayShared {
  alignas(128) unsigned char stage[relay_stages][relay_piece];
  std::uint64_t loaded[relay_stages];
  std::byte* to[relay_stages];
  unsigned bytes[relay_stages];
};

// The dynamic shared memory of a kernel that launch_relay launches.
__device__ __forceinline__ RelayShared& relay_shared() {
  extern __shared__ uint4 relay_memory[];
  return *reinterpret_cast<RelayShared*>(relay_memory);
}

// Launches blocks that take as much shared memory as a relay does, so that they share no multiprocessor either.
template <class... P, class... A>
void launch_apart(const char* name, void (*kernel)(P...), int blocks, int threads, Stream s, A&&... arguments) {
  constexpr int bytes = static_cast<int>(sizeof(RelayShared));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
  launch(name, kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), bytes, stream_of(s),
         false, std::forward<A>(arguments)...);
}

// Launches blocks of one warp.
template <class... P, class... A>
void launch_relay(const char* name, void (*kernel)(P...), int blocks, Stream s, A&&... arguments) {
  launch_apart(name, kernel, blocks, 32, s, std::forward<A>(arguments)...);
}

// Of one thread, which calls start() first.
class Relay {
 public:
  // The latest store may still read its stage while the next load begins, so `ahead` is at most relay_stages - 2.
  __device__ Relay(RelayShared& s, unsigned ahead) : s_(s), ahead_(ahead) {}
  __device__ void start() {
    for (int i = 0; i < relay_stages; ++i) barrier_init(shared_address(&s_.loaded[i]), 1);
    barrier_init_fence();
  }

  // Copies `bytes` bytes, which 16 divides.
  __device__ void copy(const std::byte* from, std::byte* to, unsigned bytes) {
    const unsigned pieces = (bytes + relay_piece - 1) / relay_piece, each = (bytes / 16 + pieces - 1) / pieces * 16;
    for (unsigned at = 0; at < bytes; at += each) load(from + at, to + at, min(each, bytes - at));
  }
  // Returns when all bytes are there.
  __device__ void finish() {
    while (stored_ < begun_) store();
    wait_stores();
  }

 private:
  __device__ void load(const std::byte* from, std::byte* to, unsigned bytes) {
    const unsigned i = begun_ % relay_stages, barrier = shared_address(&s_.loaded[i]);
    wait_stores_read<1>();
    s_.to[i] = to, s_.bytes[i] = bytes;
    barrier_expect(barrier, bytes);
    bulk_load(shared_address(s_.stage[i]), from, bytes, barrier);
    if (++begun_ - stored_ > ahead_) store();
  }
  __device__ void store() {
    const unsigned i = stored_ % relay_stages;
    barrier_wait(shared_address(&s_.loaded[i]), stored_ / relay_stages & 1);
    bulk_store(s_.to[i], shared_address(s_.stage[i]), s_.bytes[i]);
    commit_stores();
    ++stored_;
  }

  RelayShared& s_;
  unsigned ahead_;  // loads that no store follows yet
  unsigned begun_ = 0, stored_ = 0;
};

}  // namespace kvlab::cuda
