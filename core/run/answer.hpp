// Every pass over items feeds a prompt, then its question, then the answer token by token.
#pragma once
#include <kvlab/random.hpp>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "run/items.hpp"
#include "run/sampling.hpp"

namespace kvlab {

// Whether the model ended its answer with this token. It is then no part of the text, and not fed when the conversation
// goes on. A text that the task forces keeps all of its tokens.
bool ends_answer(const Item& item, int token, const Tokenizer& tokenizer);

// Looks for an item's stop texts in an answer that grows token by token. Borrows the item.
class StopTexts {
 public:
  explicit StopTexts(const Item& item) : item_(&item) {}
  // Whether the answer contains one of them. tokens: of the answer so far, one more than in the call before.
  bool found(std::span<const int> tokens, const Tokenizer& tokenizer);

 private:
  const Item* item_;
  std::string bytes_;  // of the tokens
};

// The text of an answer that is scored: up to its first stop text, if it has one.
std::string answer_text(const Item& item, std::span<const int> tokens, const Tokenizer& tokenizer);

// Draws the tokens of one answer, one random number each. The numbers follow from the seeds and from the item's sample,
// question and draw alone. So neither the batch nor earlier cells change them, and all policies get the same ones.
class Draws {
 public:
  Draws(const SamplingSpec& spec, std::int64_t seed, const Item& item);
  int next(std::span<const float> logits) { return sample(logits, how_, random_.unit()); }  // -1 unless all are finite

 private:
  Sampling how_;
  Random random_;
};
// Nothing where the item's answer is not drawn. seed: the cell's.
std::optional<Draws> draws_of(const SamplingSpec& spec, std::int64_t seed, const Item& item);

// An item's answer as it grows: the task's tokens where it forces them, else drawn ones, else the most likely ones.
class Answer {
 public:
  enum class Stop : std::uint8_t { none, eos, length, forced, text };

  // An answer that is not forced has at most `most` tokens, and at most the item's own limit. Borrows the item.
  explicit Answer(const Item& item, int most = std::numeric_limits<int>::max(),
                  std::optional<Draws> draws = std::nullopt);

  // The next token after these logits [vocab]; -1 where they are not finite or the task forces its own. A drawn answer
  // wants one call for each of its tokens. Several answers may choose at the same time.
  int choose(std::span<const float> logits);
  // Takes the next token and returns it. logits [vocab]: those after the latest token; chosen: by choose(), or their
  // argmax where nothing is drawn. The answer must not have ended.
  int take(std::span<const float> logits, const Tokenizer& tokenizer);
  int take(int chosen, const Tokenizer& tokenizer);
  int take_forced();  // the same of tokens that the task forces

  const std::vector<int>& tokens() const { return tokens_; }  // an end-of-sequence token included
  Stop stop() const { return stop_; }
  bool ended() const { return stop_ != Stop::none; }

 private:
  const Item* item_;
  std::size_t most_;
  std::vector<int> tokens_;
  StopTexts stops_;
  std::optional<Draws> draws_;
  Stop stop_ = Stop::none;
};

const char* name_of(Answer::Stop stop);  // as in the column `stop`

// Feeds one sequence after the other to an engine. Borrows the engine.
class Sequence {
 public:
  explicit Sequence(Engine& engine);

  // Where a question begins in an item's fed tokens. A later turn also feeds the questions before it.
  struct Asked {
    std::size_t fed = 0;         // its first token
    std::uint32_t question = 0;  // for Engine::ask
  };
  // Opens a slot for the item's prompt and feeds its question. After out_of_memory it can only be closed. asked:
  // ascending; empty = question 0.
  // context: restored in place of the prompt, null = none. prefilled: called between a prompt and its question.
  Fit begin(const Item& item, std::span<const Asked> asked = {}, const SavedSequence* context = nullptr,
            const std::function<void()>& prefilled = {});
  int slot() const { return slot_; }
  Fit feed(int token);
  void close();

  std::span<const float> logits() const { return logits_; }  // [vocab], after the latest token

 private:
  View<float, 2> view() {
    return View<float, 2>::dense(logits_.data(), {1, static_cast<std::int64_t>(logits_.size())});
  }

  Engine& engine_;
  std::vector<float> logits_;
  int slot_ = -1;
};

}  // namespace kvlab
