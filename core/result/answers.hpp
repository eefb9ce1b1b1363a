// The answers of several cells of one policy, by the question that they answer, so that two policies can be paired.
#pragma once
#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "result/paired.hpp"
#include "result/results.hpp"

namespace kvlab::results {

// What makes a question the same under two policies.
struct Question {
  std::int64_t seed = 0, sample = 0, question = 0;  // sample: index in the task
  std::string prompt;                               // SHA-256 of its tokens
  auto operator<=>(const Question&) const = default;
};

// The answers to one question in all cells of a policy: its repeats, or its requests in a workload. They are one
// observation, their mean.
struct Answered {
  double score = not_measured;  // of forced texts: nats per token
  double weight = 1;            // of forced texts: tokens
  double tokens = 0;            // of the answer
  double cut = 0, looping = 0;  // shares: ended by the limit of length; ends_in_loop()
  bool forced = false;          // the task's text, scored by its perplexity
  std::string output;           // of the first one
};

using Answers = std::map<Question, Answered>;

struct CellSamples {
  std::int64_t seed = 0;
  const std::vector<SampleRow>* samples = nullptr;
};

// Samples without task_sample (files of earlier versions) are left out: they do not say which ones share a context.
Answers answers_of(const std::vector<CellSamples>& cells);

// Contexts get numbers, the same for every list of answers: questions of a seed's sample share one, and so do samples
// with a prompt in common, such as a file's record that several seeds draw.
class Contexts {
 public:
  void add(const Answers& answers);
  int of(const Question& question);  // of an added question

 private:
  std::size_t root(std::size_t node);
  std::size_t node(const std::string& key);
  std::map<std::string, std::size_t> nodes_;
  std::vector<std::size_t> parents_;
};

struct Paired {
  std::vector<Pair> pairs;
  std::int64_t other_text = 0;              // pairs whose answers are different texts
  double own_tokens = 0, other_tokens = 0;  // of the paired answers that are not forced
};

Paired paired(const Answers& own, const Answers& other, Contexts& contexts);

}  // namespace kvlab::results
