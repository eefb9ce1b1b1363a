// Copies of place edits for Deadline::sequence. The plans of a step write their jobs to one list. After the step the
// host begins the copies on a background stream, in a batch with lists of its own, so that the next step may plan anew.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/side_stream.hpp"
#include "store/cuda_kernels.hpp"

namespace kvlab {

class Reloads {
 public:
  // Most bytes of all lists: those that plans write, taken at once, and those of batches, taken when copies begin.
  static std::size_t bytes(std::int64_t most_jobs, int slots);
  Reloads(Stream main, std::int64_t most_jobs, int slots);
  ~Reloads();
  Reloads(const Reloads&) = delete;
  Reloads& operator=(const Reloads&) = delete;

  // Where the plans of a step write jobs, and which slots have some.
  void plan_to(CudaStorePlace& a);
  // s: any layer. The functions that take it return whether copies gave frames back to the pool.

  // The main stream copies to the host which slots have jobs. What it has done by the next start() is no work there.
  void note();
  // Begins the copies of the jobs planned since the last call. It waits for the main stream, but where some work behind
  // note() was waited for already. Without memory for a batch, or beyond bytes(), the main stream makes them.
  bool start(const CudaStoreLayer& s);
  bool collect(const CudaStoreLayer& s);  // the frames of copies that are done
  // The main stream's later work runs after the copies of these slots, or after all.
  bool await(const CudaStoreLayer& s, const std::vector<std::int32_t>& slots);
  bool await_all(const CudaStoreLayer& s);
  bool under_way(int slot) const;

 private:
  struct Batch {
    StreamMemory lists;  // jobs, counts [2], frames that copies give back behind their count
    std::int64_t jobs = 0;
    std::vector<bool> slots;
    void* done = nullptr;
    bool running = false;
  };
  Batch& idle(std::int64_t jobs);  // throws std::bad_alloc
  template <class Which>
  bool end(const CudaStoreLayer& s, const Which& which);
  static CudaStoreLayer with_list_of(const CudaStoreLayer& s, const Batch& b);

  Stream main_;
  OwnedStream side_;
  void* planned_;
  std::int64_t most_in_batches_;  // jobs
  int slots_;
  bool plans_ = false;         // plans may write jobs; a graph's do whenever it is launched
  StreamMemory jobs_, marks_;  // marks_: counts [2], then [slot] whether it has jobs
  std::int32_t* known_;        // marks_ on the host, pinned
  void* noted_;
  bool notes_ = false;  // known_ is on its way, or there
  std::vector<std::unique_ptr<Batch>> batches_;
};

}  // namespace kvlab
