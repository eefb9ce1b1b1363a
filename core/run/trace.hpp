// Token ids, the positions that a policy kept of each prompt and the pages that attention read, for a cell that asks
// for `trace`. Of an attention that read a list of tokens: the pages that they lie in.
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

  // What the slot holds before an item's answer, once per item in any order.
  void kept(const Engine& engine, int slot, int item);

  // An item's answer has ended. queue: the tokens fed one by one in front of it. Of a conversation in its order.
  void answered(int item, const std::vector<int>& queue, const std::vector<int>& answer);

  // Which item and which of its tokens each row of the next steps is.
  struct Row {
    int item = 0, token = 0;
  };
  void rows(std::vector<Row> rows) { rows_ = std::move(rows); }
  Prompt reads_of_prompt() const override { return Prompt::nothing; }
  void attended(const DecodeLayer& l, const Store& store) override;

  // Kept positions and tokens, item by item, go into the trace.
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
