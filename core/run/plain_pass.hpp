// The plain pass of a cell answers every item under the policy, batch by batch. It times and traces as the cell asks.
#pragma once
#include <chrono>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/part_events.hpp"
#include "result/results.hpp"
#include "run/answer.hpp"
#include "run/cell_input.hpp"
#include "run/step_log.hpp"
#include "run/summary.hpp"
#include "run/trace.hpp"

namespace kvlab {

class PlainPass {
 public:
  PlainPass(const CellInput& in, results::CellResult& out);

  struct Answers {
    std::vector<std::vector<int>> outputs;  // by item
    Forced forced;
  };
  // Fills samples, token and step columns, ledger, trace and the summary's memory columns of `out`. Throws OutOfMemory.
  Answers run();

 private:
  using Clock = std::chrono::steady_clock;

  // An item in its slot.
  struct Row {
    Row(const Item& of, int in_cell, std::optional<Draws> draws)
        : item(&of), number(in_cell), answer(of, std::numeric_limits<int>::max(), std::move(draws)) {}

    const Item* item;
    int number;  // of the item in the cell
    int slot = -1;
    std::vector<int> queue;  // fed before the answer
    std::size_t fed = 0;     // of the queue
    std::int64_t seen = 0;   // tokens before the answer
    Answer answer;
    std::vector<float> ms;  // of each answer token
    double nll = 0;         // of forced tokens
    Clock::time_point start = Clock::now();
    double ttft = results::not_measured;

    bool asking() const { return fed < queue.size(); }
  };

  // A cache as its prompt left it, and the logits after it.
  struct Context {
    SavedSequence sequence;
    std::vector<float> logits;
  };

  Row row_of(std::size_t number) const;
  bool asked_again(const Row& row) const;
  void run_batch(std::size_t begin, std::size_t end, StepLog& log);
  void start(Row& row, StepLog& log);
  void step(std::vector<Row*>& active, StepLog& log);
  void choose(const std::vector<Row*>& active);
  template <class Logits>  // a row's logits, or the token that was chosen where nothing is forced
  void take(Row& row, Logits logits, double ms);
  bool goes_on(Row& row);
  void finish_item(Row& row);
  bool next_turn(Row& row);
  void write_tokens();

  PartEvents* events() { return events_ ? &*events_ : nullptr; }
  std::span<const float> logits_of(std::size_t row) const {
    return {logits_.data() + row * static_cast<std::size_t>(vocab_), static_cast<std::size_t>(vocab_)};
  }
  View<float, 2> logits_view(std::size_t rows) {
    return View<float, 2>::dense(logits_.data(), {static_cast<std::int64_t>(rows), vocab_});
  }

  const CellInput& in_;
  results::CellResult& out_;
  const std::vector<Item>& items_;
  std::vector<std::size_t> heads_;  // the first items of the conversations
  int vocab_;
  bool timed_;
  std::size_t batch_;  // conversations at once
  Engine engine_;
  std::optional<PartEvents> events_;  // where the cell asks for the parts of steps on a GPU
  std::optional<TraceRecorder> trace_;
  std::vector<float> logits_;
  std::vector<std::int32_t> likeliest_;              // [row]
  std::map<std::pair<int, int>, Context> contexts_;  // by sample, and by question where the prompt holds it, else -1
  std::vector<std::vector<float>> token_ms_;         // by item
  Answers answers_;
  int done_ = 0;
};

}  // namespace kvlab
