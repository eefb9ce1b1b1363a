// This CPU runs kernels as a GPU may. The threads of a block are fibers, and warps take turns at random. Several blocks
// run at once, and bulk copies land late. A kernel's mistake ends the launch with an error: some lanes never reach a
// warp operation or barrier, nothing ends a wait, or an access lies past shared memory. The headers in fake/ stand in
// for CUDA's and build on this one. runtime.cpp launches kernels; kernels make all other calls.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulator {

constexpr std::int64_t shared_of_block = 227 * 1024, static_shared_of_block = 48 * 1024;

// ---- launches ------------------------------------------------------------------------------------------------------

struct Launch {
  std::string kernel;
  dim3 grid, block;
  std::size_t shared = 0;  // dynamic, bytes
  bool early = false;      // may start before the kernel in front of it ends, so every block must wait for that end
};

// Runs all blocks; body is one thread's call of the kernel. Throws kvlab::Error (Errc::device) with what went wrong.
void run(const Launch& launch, const std::function<void()>& body);

// ---- inside of kernels ---------------------------------------------------------------------------------------------

struct Now {
  dim3 thread{0, 0, 0}, block{0, 0, 0}, block_dim, grid_dim;
};
extern Now now;  // of the thread that runs

[[noreturn]] void fail(const std::string& what);  // ends the launch

// The 32 lanes of a warp meet. The last lane to come computes every lane's result from the parts of all lanes.
constexpr std::size_t most_bytes_of_lane = 64;
using Combine = void (*)(const void* in, void* out);
void* bring(std::size_t bytes);                                // room for this lane's part
const void* meet(const char* what, unsigned mask, Combine f);  // the results of all lanes
inline int lane() { return static_cast<int>(now.thread.x % 32); }

// F is a lambda without captures: f(const In* of_lanes, Out* to_lanes).
template <class Out, class In, class F>
Out together(const char* what, unsigned mask, const In& in, F) {
  static_assert(sizeof(In) <= most_bytes_of_lane && sizeof(Out) <= most_bytes_of_lane);
  std::memcpy(bring(sizeof(In)), &in, sizeof(In));
  const auto* all = static_cast<const Out*>(
      meet(what, mask, [](const void* from, void* to) { F{}(static_cast<const In*>(from), static_cast<Out*>(to)); }));
  Out own;
  std::memcpy(&own, all + lane(), sizeof own);
  return own;
}

bool meet_block(bool value);  // all threads of the block meet; true if any of them brought true
void pause();                 // others may run first
void wait_for_others();       // of blocks that may not be under way yet
void waited_for_predecessor();

// Shared memory of the block. Addresses are 32-bit, as in PTX.
void* dynamic_shared(std::size_t alignment);  // aligned to no more bytes than that
void* static_shared(int id, std::size_t bytes, std::size_t alignment);
int new_static_id();
template <class S>
S& static_shared() {
  static const int id = new_static_id();
  return *static_cast<S*>(static_shared(id, sizeof(S), alignof(S)));
}
unsigned shared_address(const void* p);
void* shared_memory(unsigned address, std::size_t bytes, std::size_t alignment);  // checked

// Copies 16 bytes, which arrive when this thread waits for its copies. Until then their destination holds garbage.
void copy_async(unsigned to, const void* from);
void wait_copies();

// Transaction barriers: a phase ends when all arrivals and all expected bytes have come.
void barrier_init(unsigned barrier, unsigned arrivals);
void barrier_expect(unsigned barrier, unsigned bytes);  // also arrives
void barrier_arrive(unsigned barrier);
void barrier_wait(unsigned barrier, unsigned parity);  // until the phase of this parity has ended

// A box of a matrix of 16-bit elements. In shared memory its rows are 128 bytes wide and swizzled by 128 bytes.
struct Box {
  const std::byte* base;
  std::int64_t rows, columns, row_stride;  // elements
  int box_rows;
};
constexpr int box_columns = 64;
// The copy lands some time later. Until then its destination holds garbage.
void bulk_copy(unsigned to, const Box& box, int x, int y, unsigned barrier);
// Bytes that lie together, likewise.
void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier);
// The store reads shared memory and writes `to` as late as this thread's waits allow.
void bulk_store(void* to, unsigned from, unsigned bytes);
void commit_stores();
void wait_stores(int groups_left, bool written);

}  // namespace emulator
