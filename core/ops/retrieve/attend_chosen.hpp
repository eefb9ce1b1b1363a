// Attention of a decode step to pages that are chosen in the same step. Where a kernel serves the arguments, one launch
// on CUDA scores the pages, chooses, adds the pins and attends.
#pragma once
#include <kvlab/stream.hpp>

#include <functional>

#include "ops/attend/attend.hpp"
#include "ops/score/turned.hpp"
#include "ops/select/chosen_pages.hpp"

namespace kvlab::ops {

// The pages that attention reads: those of `list` and those that hold a pinned token, by place. A choice writes the
// list first, of the heads that it is for.
struct ChosenRead {
  const PutOffChoice* choice = nullptr;  // null = `list` is there
  PageList list;                         // choice->out, or any list
  // What turned_heads does comes first, from the choice's queries: it writes the flags of the choice's heads and keeps
  // the queries. null = the flags are there.
  const PutOffTurns* turns = nullptr;
  Pins pins;
  FiredCount fired;   // counts once if a head leaves pages out
  PageList out = {};  // gets the pages that were read; without an index nothing does
  // Bits for PagedKv::error: of a list longer than its room, and of an entry that is no page.
  std::int32_t bad_count = 0, bad_entry = 0;
};

// Makes the choice and attends to ChosenRead's pages; a.pages is not read. It serves 16-bit rows in pages of 16 tokens
// or more, heads of 64 and 128, groups up to 8, tables of 2048 pages and 1024 heads of all rows. Returns false for
// other arguments, and on the CPU; then nothing was done. Bytes: the summaries of candidates, and K and V of the pages.
bool attend_chosen(const AttendArgs& a, const ChosenRead& read, Stream s);

// Puts off making the list read.out, which `make` does: choose_and_attend may do it in its launch. Needs may_put_off().
void put_off_list(const ChosenRead& read, std::function<void()> make);

// attend to a.pages, together with the choice and the list that were put off, where a kernel serves that.
void choose_and_attend(const AttendArgs& a, Workspace& w, Stream s);

}  // namespace kvlab::ops
