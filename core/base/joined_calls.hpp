// Calls of CUDA ops that wait (base/put_off.hpp) until the callbacks of several layers have made theirs, so that one
// launch does them for all of these layers. The first calls of all callbacks come first, then the second ones, and so
// on. That is right because callbacks whose work may join use nothing that those of other layers write. A call that
// writes where another one that waits does waits for it.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/put_off.hpp"

namespace kvlab {
namespace detail {

struct JoinedCalls {
  virtual ~JoinedCalls() = default;
  virtual const std::type_info& type() const = 0;
  virtual void run() = 0;
};
template <class Call>
struct CallsOf final : JoinedCalls {
  std::vector<Call> calls;
  const std::type_info& type() const override { return typeid(Call); }
  void run() override { Call::run(calls); }
};
// Returns the calls that one of this type joins, or null where it may not wait.
JoinedCalls* joined_calls(const std::type_info& type, const void* output, std::unique_ptr<JoinedCalls> (*make)());

}  // namespace detail

// Returns false where the call may not wait. Its caller then does the work at once. Call::run does waiting calls, which
// are all of one type. call.output() is where it writes.
template <class Call>
bool join_call(const Call& call) {
  const auto make = []() -> std::unique_ptr<detail::JoinedCalls> { return std::make_unique<detail::CallsOf<Call>>(); };
  detail::JoinedCalls* calls = detail::joined_calls(typeid(Call), call.output(), make);
  if (calls) static_cast<detail::CallsOf<Call>*>(calls)->calls.push_back(call);
  return calls != nullptr;
}

// Calls f with spans of up to `most` calls in a row that have common(call) in common.
template <class Call, class Common, class F>
void for_each_alike(std::span<const Call> calls, std::size_t most, const Common& common, const F& f) {
  for (std::size_t begin = 0, end = 0; begin < calls.size(); begin = end) {
    const auto of = common(calls[begin]);
    end = begin + 1;
    while (end < calls.size() && end - begin < most && common(calls[end]) == of) ++end;
    f(calls.subspan(begin, end - begin));
  }
}

// A callback has returned: the next call is another one's first.
void end_joined_callback();

}  // namespace kvlab
