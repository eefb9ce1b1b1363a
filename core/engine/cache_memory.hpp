// How a cap of the cache's memory on the device is divided. All numbers are bytes.
#pragma once
#include <cstdint>
#include <string>

namespace kvlab {

struct CacheMemory {
  int slots = 0;
  std::int64_t tables = 0;           // page tables, lengths, free frames, jobs of copies, numbers of the slots
  std::int64_t summaries = 0;        // of all pages of all slots
  std::int64_t state = 0;            // of the policy: per slot, and constants
  std::int64_t queries = 0;          // of a chunked prompt that wait for its end
  std::int64_t mass = 0;             // attention mass, for a policy that reads it
  std::int64_t scratch = 0;          // of callbacks
  std::int64_t frame = 0, page = 0;  // a frame; the same with its places in lists of free frames
  std::int64_t heads = 0;            // KV heads of a sequence, in all layers

  // What each callback may take as scratch: Needs::scratch_numbers for each token and query head of every slot, and a
  // matrix [head_dim, head_dim] for each query head.
  std::int64_t scratch_of_callback = 0;

  std::int64_t beside_pages() const { return tables + summaries + state + queries + mass + scratch; }
  std::int64_t least() const { return beside_pages() + heads * page; }  // with a page of each head of one sequence
  // The bytes of frames under a cap of `all`. Throws NoRoom, which names the parts, for a cap below least().
  std::int64_t frames_within(std::int64_t all) const;
  std::string text() const;  // "tables 512, page summaries 0, ..."
};

}  // namespace kvlab
