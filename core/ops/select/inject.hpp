// Replaces the pages that a selector or a policy chose by a recorded or drawn pattern (`inject` of an experiment).
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

#include <cstdint>
#include <vector>

#include "ops/page/injected.hpp"

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
  PageList list;  // in: the chosen pages; out: as many pages
  Pins pins;      // chosen pages that they pin stay, other pages that they pin are not drawn
  Heads heads;    // lists of the others stay as they are
  // [slot, kv_head, inject_words(...)]: inject_turn's number, the question, 1 + the decode step of the last list (0 = a
  // prompt's, or no clock), then a bit for each page of that list. Zero = a new sequence.
  View<std::uint32_t, 3> state;
  const std::uint32_t* sequence = nullptr;  // [slot] number of the sequence
  const std::uint32_t* question = nullptr;  // [slot] question of this step; needed with a record
  const std::int32_t* steps = nullptr;      // [slot] decode steps of the sequence; see inject_turn
  int layer = 0;
  std::uint64_t seed = 0;
  std::int32_t overlap = 0;  // millionths of a list that come from the head's last list
  RecordedPages recorded;    // replaces both overlaps
  // [slot] decode steps of the sequence; null in a prompt, or where all lists take `overlap`. With a clock, a list
  // takes rerank_overlap if the head's last one is of an earlier step than the step before.
  const std::int32_t* clock = nullptr;
  std::int32_t rerank_overlap = 0;

  constexpr std::uint32_t asked(int slot) const { return recorded.first ? question[slot] : 0; }
};

constexpr int inject_header = 3;  // words before the bits
constexpr std::int64_t inject_words(std::int64_t pages) { return inject_header + (pages + 31) / 32; }

// Overlap: of a list's n pages, round(overlap * n) come from the head's last list, pinned ones among them, and
// round(rerank_overlap * n) where inject_reranks. If there are too few other pages, more come from it. A sequence's
// first list stays. Recorded: the list takes the recorded pages that exist, then others up to n; a list stays where the
// question has no record. A hash of seed, sequence, layer, head, the list's number (overlap only) and page draws the
// pages. Throws Errc::plugin if a chosen page does not exist; on CUDA the op skips it. Bytes: lists and state.
void inject_pages(const InjectArgs& a, Stream s);
void inject_pages_reference(const InjectArgs& a);

// The same for layers whose lists differ, CUDA only. Layers that differ in memory alone share a launch.
struct InjectCall {
  InjectArgs args;
  Stream stream;
};
void inject_in_layers(const std::vector<InjectCall>& calls);

// Which list is a head's next one, and the number to keep for the one after it. kept = that number; 0 = none of this
// question. Without `steps` lists are counted: the number is that of the lists so far. With `steps` the list is that of
// the decode step in the question, and the number is 1 + the steps before the question.
struct InjectTurn {
  std::uint32_t list, keep;
};
constexpr InjectTurn inject_turn(std::uint32_t kept, const std::int32_t* steps, int slot) {
  if (!steps) return {kept, kept + 1};
  const std::uint32_t now = static_cast<std::uint32_t>(steps[slot]) + 1, first = kept ? kept : now;
  return {now - first, first};
}

// Whether a head's last list is older than the step before. last: the state's word. The first list behind a prompt's is
// never so.
constexpr bool inject_reranks(std::uint32_t last, const std::int32_t* clock, int slot) {
  return clock && last > 0 && static_cast<std::uint32_t>(clock[slot]) > last;
}
constexpr std::uint32_t inject_now(const std::int32_t* clock, int slot) {
  return clock ? static_cast<std::uint32_t>(clock[slot]) + 1 : 0;
}

// Returns how many pages of a list of n come from the last list.
constexpr int inject_kept(std::int32_t overlap, int n) {
  return static_cast<int>((std::int64_t{overlap} * n + 500'000) / 1'000'000);
}

// Pages of greater keys are drawn first. Keys of different pages differ.
constexpr std::uint64_t inject_key(std::uint64_t stream, std::uint32_t page) {
  return (inject_mix(stream ^ page) >> 32 << 32) | (0xffffffffu - page);
}

}  // namespace kvlab::ops
