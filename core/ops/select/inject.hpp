// Replaces a selector's choice of pages by a recorded or drawn pattern (`inject` of an experiment).
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// Recorded lists for the questions of a run, in memory of the stream's device.
struct RecordedPages {
  const std::int32_t* first = nullptr;  // [question] first row of `begin`; null = nothing was recorded
  const std::int32_t* steps = nullptr;  // [question] number of rows; 0 = the question has no record
  const std::int64_t* begin = nullptr;  // [row, layer, head] and one more: where each list begins in `page`
  const std::int32_t* page = nullptr;
  int questions = 0, layers = 0, heads = 0;
  int layer = 0;  // the one of `layers` that this call's layer follows

  // Returns the entry of `begin` for a question's step and head, both modulo the recorded number; -1 = none.
  constexpr std::int64_t list(std::uint32_t question, std::uint32_t step, int head) const {
    if (question >= static_cast<std::uint32_t>(questions) || steps[question] <= 0) return -1;
    const std::int64_t row =
        first[question] + static_cast<std::int64_t>(step % static_cast<std::uint32_t>(steps[question]));
    return (row * layers + layer) * heads + head % heads;
  }
};

struct InjectArgs {
  PagedKv pages;
  PageList list;  // in: the selector's pages; out: as many pages
  Pins pins;      // the selector's; pages of its list that they pin stay
  // [slot, kv_head, inject_words(...)]: steps so far, the question, then a bit for each page that the last step read.
  // With a record the steps are the question's. Zero = a new sequence.
  View<std::uint32_t, 3> state;
  const std::uint32_t* sequence = nullptr;  // [slot] number of the sequence
  const std::uint32_t* question = nullptr;  // [slot] question of this step; needed with a record
  int layer = 0;
  std::uint64_t seed = 0;
  std::int32_t overlap = 0;  // millionths of a list that come from the last step's list
  RecordedPages recorded;    // replaces `overlap`

  constexpr std::uint32_t asked(int slot) const { return recorded.first ? question[slot] : 0; }
};

constexpr int inject_header = 2;  // words before the bits
constexpr std::int64_t inject_words(std::int64_t pages) { return inject_header + (pages + 31) / 32; }

// Overlap: of a list's n pages, round(overlap * n) come from the last step's list, pinned ones among them. If there are
// too few other pages, more come from it. A sequence's first list stays. Recorded: the list takes the recorded pages
// that exist, then others up to n; a list stays where the question has no record. A hash of seed, sequence, layer,
// head, step (overlap only) and page draws the pages. Throws Errc::plugin if the selector chose a page that does not
// exist; on CUDA the op skips it. Bytes: lists and state.
void inject_pages(const InjectArgs& a, Stream s);
void inject_pages_reference(const InjectArgs& a);

// Returns how many pages of a list of n come from the last step's list.
constexpr int inject_kept(std::int32_t overlap, int n) {
  return static_cast<int>((std::int64_t{overlap} * n + 500'000) / 1'000'000);
}

constexpr std::uint64_t inject_mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
constexpr std::uint64_t inject_stream(std::uint64_t seed, int layer, std::uint32_t sequence, int head,
                                      std::uint32_t step) {
  std::uint64_t x = inject_mix(seed);
  x = inject_mix(x ^ static_cast<std::uint32_t>(layer));
  x = inject_mix(x ^ sequence);
  x = inject_mix(x ^ static_cast<std::uint32_t>(head));
  return inject_mix(x ^ step);
}
// Pages of greater keys are drawn first. Keys of different pages differ.
constexpr std::uint64_t inject_key(std::uint64_t stream, std::uint32_t page) {
  return (inject_mix(stream ^ page) >> 32 << 32) | (0xffffffffu - page);
}

}  // namespace kvlab::ops
