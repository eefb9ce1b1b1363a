// Records token ids, the positions that a policy kept of each prompt, and the pages that attention read, for the metric
// trace. Where attention read a list of tokens, these are the pages of the tokens.
#pragma once
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "result/results.hpp"
#include "run/items.hpp"

namespace kvlab {

class TraceRecorder final : public EngineObserver {
 public:
  // Borrows the items.
  TraceRecorder(const std::vector<Item>& items, results::Trace& out);

  // Records the positions in the slot before an item's answer; once per item in any order.
  void kept(const Engine& engine, int slot, int item);

  // Records an item's answer. queue: the tokens fed one by one in front of it. Turns of a conversation come in order.
  void answered(int item, const std::vector<int>& queue, const std::vector<int>& answer);

  // Sets the item of each row in the next steps, and which token of its answer comes next.
  struct Row {
    int item = 0, token = 0;
  };
  void rows(std::vector<Row> rows) { rows_ = std::move(rows); }
  Prompt reads_of_prompt() const override { return Prompt::nothing; }
  void attended(const DecodeLayer& l, const Store& store) override;

  // Writes kept positions and tokens, item by item, into the trace.
  void finish(const Shape& shape);

 private:
  struct Tokens {
    std::vector<int> fed, answer;  // fed: the prompt too
  };

  const std::vector<Item>& items_;
  results::Trace& out_;
  std::vector<Row> rows_;
  std::vector<std::vector<std::vector<std::int32_t>>> kept_;  // by item, then layer and KV head
  std::vector<Tokens> tokens_;                                // by item
};

}  // namespace kvlab
