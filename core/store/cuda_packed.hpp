// Copies of pages that are packed on the host (ops/page/packed.hpp), by the jobs of place and page edits.
#pragma once
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab {
struct CudaStoreLayer;
}

namespace kvlab::device_store {

// Unpacking at the link's rate takes twice as many as plain copies take. A step leaves room for those of plain copies
// alone; whole steps were fastest so (core/bench/RESULTS.md).
constexpr int packing_multiprocessors = 8;

struct PackingJobs {
  const std::int32_t* jobs = nullptr;  // as of CudaStorePlace
  // counts[0]: jobs. With `beside`, counts[1] is 0, both are zero afterwards, and frames that pages leave are
  // `returned`.
  std::int32_t* counts = nullptr;
  bool beside = false;
  int to = 0;  // the tier of the jobs without `beside`, whose pages are counted
};

// Copies the pages, with one block on a multiprocessor. Full pages that go down are packed; those that come up are
// unpacked.
void copy_packing(const CudaStoreLayer& s, const PackingJobs& j, int blocks, Stream stream);

}  // namespace kvlab::device_store
