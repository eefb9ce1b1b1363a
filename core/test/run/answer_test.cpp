#include "run/answer.hpp"

#include "run/sampling.hpp"
#include "run/stops.hpp"
#include "support/contract.hpp"
#include "test/support/task_fixture.hpp"

using namespace kvlab;

namespace {

// Logits with their maximum at `token`.
std::vector<float> favour(const Tokenizer& tokenizer, int token) {
  std::vector<float> logits(static_cast<std::size_t>(tokenizer.vocab_size()));
  logits[static_cast<std::size_t>(token)] = 1;
  return logits;
}

}  // namespace

TEST_CASE("an answer ends at the end token, at its longest, or with the forced tokens") {
  const auto tokenizer = test::test_vocabulary("gpt-2");
  const int eos = tokenizer->eos_ids().at(0);
  const auto take = [&](Answer& a, int token) { return a.take(favour(*tokenizer, token), *tokenizer); };
  Item item;
  item.max_new = 3;

  Answer full(item);
  CHECK(take(full, 5) == 5);
  CHECK(take(full, 6) == 6);
  CHECK(!full.ended());
  take(full, 7);
  CHECK(full.ended());
  CHECK(name_of(full.stop()) == std::string("length"));
  CHECK(full.tokens() == std::vector<int>{5, 6, 7});

  Answer shorter(item, 1), longer(item, 9);
  take(shorter, 5);
  CHECK(shorter.ended());
  for (int i = 0; i < 3; ++i) take(longer, 5);
  CHECK(longer.ended());

  Answer stopped(item);
  take(stopped, 5);
  take(stopped, eos);
  CHECK(name_of(stopped.stop()) == std::string("eos"));
  CHECK(stopped.tokens() == std::vector<int>{5, eos});

  item.forced = {eos, 8};
  Answer forced(item, 1);  // limits hold for the model's own answers only
  CHECK(take(forced, 5) == eos);
  CHECK(!forced.ended());
  CHECK(take(forced, 5) == 8);
  CHECK(name_of(forced.stop()) == std::string("forced"));
  CHECK_FALSE(ends_answer(item, eos, *tokenizer));
  item.forced.clear();
  CHECK(ends_answer(item, eos, *tokenizer));
  CHECK_FALSE(ends_answer(item, 5, *tokenizer));
}

TEST_CASE("the place of a stop text") {
  CHECK(stop_place("4\n\nQuestion: 5", {"\n\nQuestion:"}) == 1);
  CHECK(stop_place("one two three", {"three", "two"}) == 4);  // the answer's first, not the list's
  CHECK(stop_place("one two three", {"two", "three"}) == 4);
  CHECK(stop_place("one", {"two"}) == std::string::npos);
  CHECK(stop_place("one", {}) == std::string::npos);
  CHECK(stop_place("stop", {"stop"}) == 0);
  CHECK(stop_place("\n```", {"\n```"}) == 0);
  CHECK(stop_place("\n one\ntwo", {"\n"}) == 5);  // white space counts after the first word
  CHECK(stop_place("\n \n", {"\n", " "}) == std::string::npos);
}

TEST_CASE("an answer ends at a stop text, though several tokens make it, and the text before it counts") {
  const auto tokenizer = test::test_vocabulary("gpt-2");
  const std::vector<int> tokens = tokenizer->encode("The answer is 42.\n\nQuestion: what next? Question: more");
  Item item;
  item.max_new = static_cast<int>(tokens.size());
  item.stops = {"nothing", "\n\nQuestion:"};
  Answer answer(item);
  std::size_t taken = 0;
  while (!answer.ended()) answer.take(tokens[taken++], *tokenizer);
  CHECK(name_of(answer.stop()) == std::string("text"));
  CHECK(tokenizer->decode(answer.tokens()) == "The answer is 42.\n\nQuestion:");
  CHECK(answer_text(item, answer.tokens(), *tokenizer) == "The answer is 42.");

  item.stops = {"swer i"};  // it begins and ends inside tokens
  Answer inside(item);
  for (taken = 0; !inside.ended();) inside.take(tokens[taken++], *tokenizer);
  CHECK(answer_text(item, inside.tokens(), *tokenizer) == "The an");

  item.stops = {"never"};
  Answer whole(item);
  for (const int token : tokens) whole.take(token, *tokenizer);
  CHECK(name_of(whole.stop()) == std::string("length"));

  item.stops = {"The"};
  item.forced = tokens;  // forced tokens are no answer
  Answer forced(item);
  forced.take(tokens[0], *tokenizer);
  CHECK(!forced.ended());
  CHECK(answer_text(item, tokens, *tokenizer) == tokenizer->decode(tokens));
}

TEST_CASE("a question fed after the prompt is the same text, and one sequence leaves nothing to the next") {
  const auto model = test::tiny_model("llama-gqa3");
  const auto text = test::test_text(30, model->config.vocab);
  Item whole, parts;
  whole.prompt = text;
  parts.prompt.assign(text.begin(), text.begin() + 22);
  parts.fed.assign(text.begin() + 22, text.end() - 1);
  EngineOptions options;
  options.max_tokens = 32;
  options.page_size = 8;
  Engine engine(model, test::subjects().policy(test::full_spec()), options);
  Sequence sequence(engine);
  REQUIRE(sequence.begin(whole) == Fit::ok);
  const std::vector<float> wanted(sequence.logits().begin(), sequence.logits().end());
  sequence.close();
  for (int round = 0; round < 2; ++round) {
    REQUIRE(sequence.begin(parts) == Fit::ok);
    REQUIRE(sequence.feed(text.back()) == Fit::ok);
    CHECK(kl_divergence(wanted, sequence.logits()) < 1e-6);
    CHECK(argmax(sequence.logits()) == argmax(wanted));
    sequence.close();
  }
}

TEST_CASE("random numbers of a drawn answer follow its question and its draw alone") {
  Item item;
  item.sample = 3, item.question = 1, item.draw = 2, item.max_new = 40;
  std::vector<float> logits(50);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = .1f * static_cast<float>(i % 7);
  const auto tokens = [&](const Item& of, std::int64_t seed = 5, std::int64_t cell_seed = 0) {
    SamplingSpec spec;
    spec.temperature = 1, spec.draws = 4, spec.seed = seed;
    Draws draws = *draws_of(spec, cell_seed, of);
    std::vector<int> out;
    for (int i = 0; i < 40; ++i) out.push_back(draws.next(logits));
    return out;
  };
  const std::vector<int> own = tokens(item);
  CHECK(tokens(item) == own);
  CHECK(tokens(item, 6) != own);
  CHECK(tokens(item, 5, 1) != own);
  for (int Item::*part : {&Item::sample, &Item::question, &Item::draw}) {
    Item other = item;
    other.*part += 1;
    CHECK(tokens(other) != own);
  }
  std::swap(item.sample, item.draw);
  CHECK(tokens(item) != own);

  item.draw = -1;
  SamplingSpec spec;
  CHECK_FALSE(draws_of(spec, 0, item));  // temperature 0
  spec.temperature = 1;
  CHECK_FALSE(draws_of(spec, 0, item));  // nothing is drawn to it
}
