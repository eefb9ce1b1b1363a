// Ways to bring scattered pages of one KV head each from pinned memory to frames of a GPU: the store's kernel and those
// of papers. A frame has the keys, then the values, of a page's tokens, in 16 bits.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/side_stream.hpp"

namespace kvlab::cases {

class Recall {
 public:
  enum class Way : std::uint8_t {
    relay,         // a few warps send the pages through shared memory, by bulk copies
    gather,        // blocks read the pages from pinned memory
    memcpy_page,   // a memcpy for each page
    memcpy_batch,  // one call for all pages
    // Host memory is [page, K or V, token, kv_head, dim], so that a page of a head is pieces of one token each.
    nhd_gather,
    nhd_memcpy,      // a 2D memcpy for each page
    staging,         // the host gathers the pages, a memcpy brings them, a kernel scatters them
    double_buffers,  // the same in chunks, with two buffers and two streams
  };
  static constexpr Way ways[] = {Way::relay,      Way::gather,     Way::memcpy_page, Way::memcpy_batch,
                                 Way::nhd_gather, Way::nhd_memcpy, Way::staging,     Way::double_buffers};
  struct Of {
    Way way;
    int pages, page_size;                     // kv_heads divides 2 * pages
    int blocks = way == Way::relay ? 4 : 64;  // of kernels
    int kv_heads = 8, dim = 128;
    std::int64_t chunk_bytes = std::int64_t{2} << 20;  // of double buffers

    std::int64_t page_bytes() const { return std::int64_t{4} * page_size * dim; }
    bool nhd() const { return way == Way::nhd_gather || way == Way::nhd_memcpy; }
    std::string name() const;
  };

  // Host memory has twice as many pages, as have the frames. Both lists are random.
  Recall(const Of& of, Stream s);
  Recall(const Recall&) = delete;
  Recall& operator=(const Recall&) = delete;

  // Returns whether this build has the way, and warns if it does not.
  static bool available(Way way);

  // Brings pages first to first + count - 1 of the list. The stream's later work runs after it.
  void run(int first, int count);
  // Brings all pages in two runs. Returns whether their frames have their bytes and the other frames none.
  bool right();
  void require_right();  // Errc::internal if they do not
  const Of& of() const { return of_; }
  Stream stream() const { return stream_; }

 private:
  using Pinned = std::unique_ptr<std::byte, void (*)(void*)>;
  static Pinned pinned(std::size_t bytes);
  // Gathers pages in the buffers from byte `at` on, copies them and scatters them.
  void stage(int first, int count, std::int64_t at, Stream s);

  Of of_;
  Stream stream_;
  int pieces_, piece_bytes_;
  std::int64_t stride_;
  std::vector<std::int64_t> from_, to_;  // [page] offsets
  std::vector<const void*> sources_;     // [page]
  std::vector<void*> targets_;
  std::vector<std::size_t> bytes_;
  Pinned host_, host_stage_;
  StreamMemory frames_, stage_, from_list_, to_list_;
  std::deque<SideStream> lanes_;
};

}  // namespace kvlab::cases
