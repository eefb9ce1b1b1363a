#include "result/answers.hpp"

#include <cmath>

#include "result/loop.hpp"

namespace kvlab::results {
namespace {

bool is_forced(const SampleRow& row) { return row.stop == "forced"; }

// A text's score is its perplexity, exp(nats per token).
double score_of(const SampleRow& row) { return is_forced(row) ? std::log(row.score) : row.score; }

void add_to_mean(double& mean, double value, double count) { mean += (value - mean) / count; }

}  // namespace

Answers answers_of(const std::vector<CellSamples>& cells) {
  Answers out;
  std::map<Question, double> counts;
  for (const CellSamples& cell : cells)
    for (const SampleRow& row : *cell.samples) {
      if (row.task_sample < 0) continue;
      const Question question{cell.seed, row.task_sample, row.question, row.prompt_sha256};
      const double count = ++counts[question];
      Answered& a = out[question];
      if (count == 1) {
        a.score = score_of(row);
        a.forced = is_forced(row);
        a.output = row.output;
      } else {
        add_to_mean(a.score, score_of(row), count);
      }
      if (a.forced) a.weight = static_cast<double>(row.output_tokens);
      const bool cut = row.stop == "length";
      add_to_mean(a.tokens, static_cast<double>(row.output_tokens), count);
      add_to_mean(a.cut, cut, count);
      add_to_mean(a.looping, !a.forced && ends_in_loop(row.output, cut), count);
    }
  return out;
}

std::size_t Contexts::node(const std::string& key) {
  const auto [at, made] = nodes_.emplace(key, parents_.size());
  if (made) parents_.push_back(at->second);
  return at->second;
}

std::size_t Contexts::root(std::size_t node) {
  while (parents_[node] != node) node = parents_[node] = parents_[parents_[node]];
  return node;
}

// Joins each sample with the prompts that it asks.
void Contexts::add(const Answers& answers) {
  for (const auto& [q, answer] : answers) {
    const std::size_t sample = root(node(std::to_string(q.seed) + " " + std::to_string(q.sample)));
    if (!q.prompt.empty()) parents_[root(node(q.prompt))] = sample;
  }
}

int Contexts::of(const Question& q) {
  return static_cast<int>(root(node(std::to_string(q.seed) + " " + std::to_string(q.sample))));
}

Paired paired(const Answers& own, const Answers& other, Contexts& contexts) {
  Paired out;
  for (const auto& [question, a] : own) {
    const auto found = other.find(question);
    if (found == other.end() || !std::isfinite(a.score) || !std::isfinite(found->second.score)) continue;
    const Answered& b = found->second;
    out.pairs.push_back({contexts.of(question), a.score * a.weight, b.score * b.weight, a.weight});
    out.other_text += a.output != b.output;
    if (a.forced) continue;
    out.own_tokens += a.tokens;
    out.other_tokens += b.tokens;
  }
  return out;
}

}  // namespace kvlab::results
