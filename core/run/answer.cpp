#include "run/answer.hpp"

#include <kvlab/error.hpp>

#include <algorithm>

#include "run/stops.hpp"

namespace kvlab {

bool ends_answer(const Item& item, int token, const Tokenizer& tokenizer) {
  return item.forced.empty() && tokenizer.is_eos(token);
}

bool StopTexts::found(std::span<const int> tokens, const Tokenizer& tokenizer) {
  if (item_->stops.empty()) return false;
  bytes_ += tokenizer.token_bytes(tokens.back());
  // The bytes of the tokens may have a space in front that the text has not, so the text has the last word.
  return stop_place(bytes_, item_->stops) != std::string::npos &&
         stop_place(tokenizer.decode(tokens), item_->stops) != std::string::npos;
}

std::string answer_text(const Item& item, std::span<const int> tokens, const Tokenizer& tokenizer) {
  std::string text = tokenizer.decode(tokens);
  if (item.forced.empty()) text.resize(std::min(text.size(), stop_place(text, item.stops)));
  return text;
}

Draws::Draws(const SamplingSpec& spec, std::int64_t seed, const Item& item)
    : how_{spec.temperature, spec.top_p, spec.top_k}, random_(static_cast<std::uint64_t>(spec.seed), 0) {
  for (const std::int64_t part :
       {seed, std::int64_t{item.sample}, std::int64_t{item.question}, std::int64_t{item.draw}})
    random_ = Random(random_.next(), static_cast<std::uint64_t>(part));
}

std::optional<Draws> draws_of(const SamplingSpec& spec, std::int64_t seed, const Item& item) {
  if (!spec.on() || item.draw < 0) return std::nullopt;
  return Draws(spec, seed, item);
}

Answer::Answer(const Item& item, int most, std::optional<Draws> draws)
    : item_(&item),
      most_(item.forced.empty() ? static_cast<std::size_t>(std::min(item.max_new, most)) : item.forced.size()),
      stops_(item),
      draws_(std::move(draws)) {}

int Answer::choose(std::span<const float> logits) {
  if (!item_->forced.empty()) return -1;
  return draws_ ? draws_->next(logits) : argmax(logits);
}

int Answer::take(std::span<const float> logits, const Tokenizer& tokenizer) { return take(choose(logits), tokenizer); }

int Answer::take(int token, const Tokenizer& tokenizer) {
  if (!item_->forced.empty()) return take_forced();
  if (token < 0) throw Error(Errc::internal, "got an answer token of logits that are not finite");
  tokens_.push_back(token);
  if (ends_answer(*item_, token, tokenizer))
    stop_ = Stop::eos;
  else if (stops_.found(tokens_, tokenizer))
    stop_ = Stop::text;
  else if (tokens_.size() >= most_)
    stop_ = Stop::length;
  return token;
}

int Answer::take_forced() {
  tokens_.push_back(item_->forced[tokens_.size()]);
  if (tokens_.size() >= most_) stop_ = Stop::forced;
  return tokens_.back();
}

const char* name_of(Answer::Stop stop) {
  static constexpr const char* names[] = {"", "eos", "length", "forced", "text"};
  return names[static_cast<int>(stop)];
}

Sequence::Sequence(Engine& engine) : engine_(engine), logits_(static_cast<std::size_t>(engine.model().config.vocab)) {}

Fit Sequence::begin(const Item& item, std::span<const Asked> asked, const SavedSequence* context,
                    const std::function<void()>& prefilled) {
  slot_ = engine_.open(static_cast<std::uint32_t>(item.sample));
  for (const Asked& a : asked)
    if (a.fed == 0) engine_.ask(slot_, a.question);
  Fit fit = context ? engine_.restore(slot_, *context) : engine_.prefill(slot_, item.prompt, true, view());
  if (fit == Fit::ok && !context && prefilled) prefilled();
  for (std::size_t i = 0; fit == Fit::ok && i <= item.fed.size(); ++i) {
    for (; !asked.empty() && asked.front().fed <= i; asked = asked.subspan(1))
      engine_.ask(slot_, asked.front().question);
    if (i < item.fed.size()) fit = feed(item.fed[i]);
  }
  return fit;
}

Fit Sequence::feed(int token) { return engine_.step({slot_}, {&token, 1}, view()); }

void Sequence::close() { engine_.close(slot_); }

}  // namespace kvlab
