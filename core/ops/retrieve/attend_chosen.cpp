#include "ops/retrieve/attend_chosen.hpp"

#include <utility>

#include "base/device_op.hpp"
#include "base/put_off.hpp"

namespace kvlab::ops {
namespace {

thread_local ChosenRead waiting;
thread_local std::function<void()> make_waiting;

void make_list() { std::exchange(make_waiting, {})(); }

bool same(const IndexList& a, const IndexList& b) {
  return a.index.data == b.index.data && a.count.data == b.count.data && a.slots == b.slots;
}

}  // namespace

void put_off_list(const ChosenRead& read, std::function<void()> make) {
  if (is_put_off(make_list)) run_put_off();
  waiting = read;
  make_waiting = std::move(make);
  put_off(make_list);
}

bool attend_chosen(const AttendArgs& a, const ChosenRead& read, Stream s) {
  if (s.device() != Device::cuda) return false;
  return on_cuda<attend_chosen>(a, read, s);
}

void choose_and_attend(const AttendArgs& a, Workspace& w, Stream s) {
  const PutOffChoice* choice = put_off_choice();
  const PutOffTurns* turns = put_off_turns();
  if (turns && !(choice && turns->flags(choice->choice.heads))) run_put_off(), choice = nullptr, turns = nullptr;
  const bool listed = is_put_off(make_list);
  if (a.pages && (choice || listed)) {
    ChosenRead read;
    if (listed) {
      read = waiting;
    } else {
      read.list = *a.pages;
      if (choice->out.final) read.fired = choice->out.final->count;
    }
    read.choice = choice, read.turns = turns;
    const bool list = listed ? same(read.out, *a.pages) && read.out.index.extent[0] == a.kv.rows
                             : choice->out.final && choice->out.final->index;
    PutOffKept kept;  // the op's call would run what waits
    if (list && (!choice || (same(choice->out, read.list) && choice->kv.rows == a.kv.rows)) &&
        attend_chosen(a, read, s))
      return kept.drop();
  }
  attend(a, w, s);
}

}  // namespace kvlab::ops
