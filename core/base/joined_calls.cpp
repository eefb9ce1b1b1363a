#include "base/joined_calls.hpp"

#include <algorithm>

#include "base/part_timer.hpp"

namespace kvlab {
namespace {

thread_local struct {
  std::vector<std::unique_ptr<detail::JoinedCalls>> at;  // [place of a call in its callback]
  std::vector<const void*> outputs;                      // of all calls
  std::size_t next = 0;                                  // the place of this callback's next call
  int ended = 0;                                         // callbacks before this one
} waiting;

void forget() { waiting.at.clear(), waiting.outputs.clear(), waiting.next = 0, waiting.ended = 0; }

void run_waiting() {
  const auto now = std::exchange(waiting.at, {});
  forget();
  const PartTimer timer(Part::select);  // what callbacks find behind a step, and choose by it
  for (const auto& calls : now) calls->run();
}

}  // namespace

detail::JoinedCalls* detail::joined_calls(const std::type_info& type, const void* output,
                                          std::unique_ptr<JoinedCalls> (*make)()) {
  if (!is_put_off(run_waiting)) forget();  // a scope's end dropped them
  if (!may_join_put_off() || !may_put_off()) return nullptr;
  // Other work that waits may write what this call reads.
  if (put_off.count > (is_put_off(run_waiting) ? 1 : 0)) return nullptr;
  if (std::ranges::find(waiting.outputs, output) != waiting.outputs.end()) run_put_off();
  const bool goes_on = waiting.next < waiting.at.size() && waiting.at[waiting.next]->type() == type;
  if (!goes_on && (waiting.ended > 0 || waiting.next < waiting.at.size())) run_put_off();
  if (!goes_on) waiting.at.push_back(make());
  if (!is_put_off(run_waiting)) kvlab::put_off(run_waiting);
  waiting.outputs.push_back(output);
  return waiting.at[waiting.next++].get();
}

void end_joined_callback() {
  waiting.next = 0;
  waiting.ended += !waiting.at.empty();
}

}  // namespace kvlab
