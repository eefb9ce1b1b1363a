#include "result/answers.hpp"

#include <catch2/catch.hpp>
#include <cmath>

using namespace kvlab;
using namespace kvlab::results;

namespace {

SampleRow sample(std::int64_t task_sample, std::int64_t question, const std::string& prompt, double score) {
  SampleRow s;
  s.task_sample = task_sample;
  s.question = question;
  s.prompt_sha256 = prompt;
  s.score = score;
  s.output = score > 0 ? "yes" : "no";
  s.output_tokens = score > 0 ? 4 : 6;
  s.stop = "eos";
  return s;
}

Paired pair_of(const Answers& own, const Answers& other) {
  Contexts contexts;
  contexts.add(own);
  contexts.add(other);
  return paired(own, other, contexts);
}

}  // namespace

TEST_CASE("answers are paired by seed, sample, question and prompt, in whatever order they stand") {
  const std::vector<SampleRow> a = {sample(0, 0, "p", 1), sample(0, 1, "q", 0), sample(1, 0, "r", 1)};
  const std::vector<SampleRow> b = {sample(1, 0, "r", 0), sample(0, 0, "p", 1), sample(0, 1, "other", 1)};
  const Paired both = pair_of(answers_of({{7, &a}}), answers_of({{7, &b}}));
  REQUIRE(both.pairs.size() == 2);
  CHECK((both.pairs[0].own == 1 && both.pairs[0].other == 1));
  CHECK((both.pairs[1].own == 1 && both.pairs[1].other == 0));
  CHECK(both.other_text == 1);
  CHECK((both.own_tokens == 8 && both.other_tokens == 10));
  CHECK(pair_of(answers_of({{7, &a}}), answers_of({{8, &b}})).pairs.empty());
}

TEST_CASE("questions of a sample share a context, and so do samples of several seeds with one prompt") {
  const std::vector<SampleRow> first = {sample(0, 0, "p", 1), sample(0, 1, "q", 1), sample(1, 0, "r", 1)};
  const std::vector<SampleRow> second = {sample(0, 0, "s", 1), sample(1, 0, "q", 1)};
  const Answers answers = answers_of({{1, &first}, {2, &second}});
  const Paired p = pair_of(answers, answers);  // in the order of seed, sample, question
  REQUIRE(p.pairs.size() == 5);
  CHECK(p.pairs[0].context == p.pairs[1].context);
  CHECK(p.pairs[0].context != p.pairs[2].context);
  CHECK(p.pairs[3].context != p.pairs[0].context);
  CHECK(p.pairs[4].context == p.pairs[0].context);
}

TEST_CASE("repeats of a question are one observation, their mean") {
  std::vector<SampleRow> a = {sample(0, 0, "p", 1)}, b = {sample(0, 0, "p", 0)};
  b[0].stop = "length";
  const Answers answers = answers_of({{1, &a}, {1, &b}});
  REQUIRE(answers.size() == 1);
  const Answered& mean = answers.begin()->second;
  CHECK(mean.score == 0.5);
  CHECK(mean.tokens == 5);
  CHECK(mean.cut == 0.5);
}

TEST_CASE("a forced text is compared by its nats per token") {
  std::vector<SampleRow> a = {sample(0, 0, "p", std::exp(2.)), sample(1, 0, "q", std::exp(3.))};
  for (SampleRow& row : a) row.stop = "forced";
  const Paired p = pair_of(answers_of({{1, &a}}), answers_of({{1, &a}}));
  REQUIRE(p.pairs.size() == 2);
  CHECK(p.pairs[0].weight == 4);
  CHECK(p.pairs[0].own == Approx(8));
  CHECK(p.own_tokens == 0);  // its length is the task's
}

TEST_CASE("samples that do not say their context, or have no score, are not paired") {
  const std::vector<SampleRow> old = {sample(-1, -1, "p", 1), sample(2, 0, "q", not_measured)};
  CHECK(answers_of({{1, &old}}).size() == 1);
  CHECK(pair_of(answers_of({{1, &old}}), answers_of({{1, &old}})).pairs.empty());
}

TEST_CASE("draws of a question are one observation, whatever order they stand in") {
  std::vector<SampleRow> own, other;
  for (int draw = 0; draw < 4; ++draw)
    for (int question = 0; question < 2; ++question) {
      own.push_back(sample(question, 0, question ? "q" : "p", draw < (question ? 1 : 3)));
      own.back().draw = draw;
      other.insert(other.begin(), sample(question, 0, question ? "q" : "p", draw == 0));
      other.front().draw = draw;
    }
  const Paired p = pair_of(answers_of({{1, &own}}), answers_of({{1, &other}}));
  REQUIRE(p.pairs.size() == 2);
  CHECK((p.pairs[0].own == 0.75 && p.pairs[0].other == 0.25));
  CHECK((p.pairs[1].own == 0.25 && p.pairs[1].other == 0.25));
  const Difference d = difference_of(p.pairs);
  CHECK((d.pairs == 2 && d.contexts == 2));
  CHECK(d.mean == 0.25);
  CHECK_FALSE(d.mcnemar);  // they are no 0/1 scores
}
