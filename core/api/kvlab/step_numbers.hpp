// Numbers of the host that change from step to step, for steps that a graph may hold. Such a graph runs no callback, so
// the numbers must lie where its ops read them before the step begins.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

#include "kvlab/error.hpp"
#include "kvlab/ops.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/stream.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

namespace ops {

// Copies host memory to memory of the stream's device, in the order of the stream. When it returns, `from` may be
// changed. Not in a callback of a step: a graph would repeat the copy.
void put_numbers(void* to, const void* from, std::size_t bytes, Stream s);

}  // namespace ops

// A decode step that begins. Arrays are host memory, [row], as in the callbacks of the step.
struct StepCounters {
  int rows = 0;
  const std::int32_t* slots = nullptr;
  const std::int32_t* position = nullptr;   // text tokens, this step's included
  const std::int32_t* step = nullptr;       // decode steps of the sequence before this one
  const std::int32_t* budget = nullptr;     // LayerKv::budget_tokens of layers that are not dense
  const std::uint32_t* sequence = nullptr;  // the sequence's number
  Stream stream = Stream::cpu();
};

// A second base of a Policy, a Scorer or a Selector. Uploads break the promise of Needs::capturable; numbers that come
// this way keep it.
class PreparesSteps {
 public:
  virtual ~PreparesSteps() = default;
  // Before every decode step. All that it puts holds for the callbacks of all layers.
  virtual void prepare_step(const StepCounters& c) = 0;
  // The kind of the step that was prepared last. Steps of one kind and as many rows give the stream the same work. So
  // seldom work may be a kind of its own: a GPU has a graph of each, and the other steps pay nothing for it.
  virtual int step_variant() const { return 0; }
};

// At most `most` numbers, always at the same address of the device. Takes them in attach.
template <class T>
class StepNumbers {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  StepNumbers() = default;
  StepNumbers(const char* tag, std::int64_t most, Workspace& w)
      : data_(static_cast<T*>(w.room(tag, static_cast<std::size_t>(most) * sizeof(T)))), most_(most) {
    fresh_.reserve(static_cast<std::size_t>(most));
    there_.reserve(static_cast<std::size_t>(most));
  }

  // An empty list to fill, for put(c). It keeps its room, so a step takes no memory.
  std::vector<T>& fresh() {
    fresh_.clear();
    return fresh_;
  }
  // In prepare_step. Numbers that are there already are not copied again.
  void put(const StepCounters& c) { put(c, fresh_.data(), std::ssize(fresh_)); }
  void put(const StepCounters& c, const T* numbers, std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    if (count == std::ssize(there_) && (count == 0 || std::memcmp(numbers, there_.data(), bytes) == 0)) return;
    if (count > most_)
      throw Error(Errc::plugin,
                  "prepare_step: got " + std::to_string(count) + " numbers, wanted at most " + std::to_string(most_));
    there_.assign(numbers, numbers + count);
    ops::put_numbers(data_, there_.data(), bytes, c.stream);
  }
  const T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  std::int64_t most_ = 0;
  std::vector<T> fresh_, there_;
};

// ops::budget_pages of decode steps. A budget in tokens needs no numbers of a step.
class BudgetPages {
 public:
  BudgetPages() = default;
  BudgetPages(const char* tag, const Shape& s, const BudgetAmount& budget, Workspace& w)
      : page_(s.page_size), kv_heads_(s.kv_heads) {
    varies_ = budget.kind == BudgetAmount::ratio || budget.kind == BudgetAmount::bytes;
    if (varies_) numbers_ = StepNumbers<std::int32_t>(tag, std::int64_t{s.max_slots} * s.kv_heads, w);
  }

  template <class Of>
  void prepare(const StepCounters& c, Of of) {
    if (!varies_) return;
    std::vector<std::int32_t>& all = numbers_.fresh();
    for (int row = 0; row < c.rows; ++row)
      all.insert(all.end(), static_cast<std::size_t>(kv_heads_), std::max(1, of(c.budget[row]) / page_));
    numbers_.put(c);
    told_ = true;
  }
  // With the same `of`. A prompt's numbers are uploaded, and so are those of a step that nobody prepared.
  template <class Of>
  ops::PageCounts of(const LayerKv& kv, Of of) const {
    if (!varies_ || !told_ || !kv.queries) return ops::budget_pages(kv, of);
    ops::PageCounts counts;
    counts.each = View<const std::int32_t, 2>::dense(numbers_.data(), {kv.rows(), kv.kv_heads()});
    return counts;
  }

 private:
  int page_ = 1, kv_heads_ = 0;
  bool varies_ = false, told_ = false;
  StepNumbers<std::int32_t> numbers_;
};

}  // namespace kvlab
