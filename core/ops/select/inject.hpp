// Page lists that follow a recorded or made-up pattern in place of a selector's choice (`inject` of an experiment).
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>

namespace kvlab::ops {

// Lists that the questions of a run follow; memory of the stream's device.
struct RecordedPages {
  const std::int32_t* first = nullptr;  // [question] a row of `begin`; null = nothing recorded
  const std::int32_t* steps = nullptr;  // [question] rows from there; 0 = none of this question
  const std::int64_t* begin = nullptr;  // [row, layer, head] and the end: into `page`
  const std::int32_t* page = nullptr;
  int questions = 0, layers = 0, heads = 0;
  int layer = 0;  // of `layers`, what this call's layer follows

  // Which entry of `begin` a question's step and head follow, both modulo; -1 = none.
  constexpr std::int64_t list(std::uint32_t question, std::uint32_t step, int head) const {
    if (question >= static_cast<std::uint32_t>(questions) || steps[question] <= 0) return -1;
    const std::int64_t row =
        first[question] + static_cast<std::int64_t>(step % static_cast<std::uint32_t>(steps[question]));
    return (row * layers + layer) * heads + head % heads;
  }
};

struct InjectArgs {
  PagedKv pages;
  PageList list;  // in: what a selector chose; out: as many pages
  Pins pins;      // of the selector; its choice of their pages stays
  // [slot, kv_head, inject_words(...)]: steps so far (recorded: of the question in the next word), that question, then
  // a bit for each page that the step before read. Zero = a new sequence.
  View<std::uint32_t, 3> state;
  const std::uint32_t* sequence = nullptr;  // [slot] numbers of the sequences
  const std::uint32_t* question = nullptr;  // [slot] whose steps these are; recorded only
  int layer = 0;
  std::uint64_t seed = 0;
  std::int32_t overlap = 0;  // millionths of a list that are of the step before
  RecordedPages recorded;    // takes the place of `overlap`

  constexpr std::uint32_t asked(int slot) const { return recorded.first ? question[slot] : 0; }
};

constexpr int inject_header = 2;  // words before the bits
constexpr std::int64_t inject_words(std::int64_t pages) { return inject_header + (pages + 31) / 32; }

// Overlap: round(overlap * n) of a list's n pages, pinned ones among them, are of the list of the step before, as far
// as there are enough other pages; a sequence's first list stays. Recorded: its pages that exist, as many as there is
// room for, then others; a list stays where nothing was recorded of the question. Which ones is drawn by a hash of
// seed, sequence, layer, head, step (overlap only) and page. Errc::plugin for a chosen page that does not exist; on
// CUDA it is passed over. Bytes: lists and state.
void inject_pages(const InjectArgs& a, Stream s);
void inject_pages_reference(const InjectArgs& a);

// Pages of a list of n that are of the step before.
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
// Greater key = drawn earlier; keys of different pages differ.
constexpr std::uint64_t inject_key(std::uint64_t stream, std::uint32_t page) {
  return (inject_mix(stream ^ page) >> 32 << 32) | (0xffffffffu - page);
}

}  // namespace kvlab::ops
