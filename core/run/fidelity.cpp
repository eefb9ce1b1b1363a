#include "run/fidelity.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/sha256.hpp"
#include "run/answer.hpp"
#include "run/averages.hpp"
#include "run/device.hpp"
#include "run/nonfinite.hpp"
#include "run/sampling.hpp"
#include "run/shadow.hpp"

namespace kvlab {
namespace {

// First token at which two answers part; -1 = not within the shorter one.
std::int64_t divergence(const std::vector<int>& a, const std::vector<int>& b) {
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    if (a[i] != b[i]) return static_cast<std::int64_t>(i);
  return -1;
}

// Makes a later turn a question of its own, which also feeds the conversation before it.
Item after(Item item, const std::vector<int>& history) {
  item.sha256 += "/" + sha256_hex({reinterpret_cast<const char*>(history.data()), history.size() * sizeof(int)});
  item.fed.insert(item.fed.begin(), history.begin(), history.end());
  item.before = 0;
  return item;
}

// Appends the values of the latest step's layers; NaN when there was no step.
void add_last(const std::vector<float>& steps, std::size_t layers, std::vector<float>& out) {
  if (steps.size() >= layers)
    out.insert(out.end(), steps.end() - static_cast<std::ptrdiff_t>(layers), steps.end());
  else
    out.insert(out.end(), layers, std::nanf(""));
}

}  // namespace

void measure_fidelity(const CellInput& in, const std::vector<std::vector<int>>& outputs, results::CellResult& out) {
  const auto& items = in.items->items;
  const Model& model = *in.model;
  const int page_size = in.policy().page_size;
  const auto layers = static_cast<std::size_t>(model.config.layers);
  Engine engine = make_engine(in, 1);
  Shadow shadow(model, page_size, engine.store().shape().max_tokens, &engine.store());
  engine.observe(&shadow);
  Sequence mine(engine);
  std::vector<float> full(static_cast<std::size_t>(model.config.vocab));
  auto& f = out.fidelity;
  f.layers = model.config.layers;
  f.offsets.push_back(0);
  std::vector<int> history;            // the conversation after its prompt, with the full cache's answers
  std::vector<Sequence::Asked> asked;  // of the conversation
  // The context that the questions of a sample share, as its prompt left it.
  struct Context {
    int sample = 0;
    SavedSequence sequence;
    std::vector<std::byte> shadow;
  };
  std::optional<Context> context;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Item item = items[i].follows ? after(items[i], history) : items[i];
    const auto& reference =
        in.references->get(in.model, item, page_size, in.experiment->fidelity_tokens, device_of(*in.experiment));
    if (in.full_runs) in.full_runs->prepare(in, {item.sample}, in.experiment->fidelity_tokens);
    shadow.reset();
    if (!items[i].follows) asked = {{0, 0}};
    asked.back().question = static_cast<std::uint32_t>(i);
    shadow.skip(static_cast<int>(item.fed.size()) - 1);  // a question's last step yields the first token
    const bool known = item.shared && context && context->sample == item.sample;
    if (known) want_room(shadow.restore(context->shadow), engine);
    const auto keep = [&] { context = {item.sample, engine.save(mine.slot()), shadow.save()}; };
    want_room(mine.begin(item, asked, known ? &context->sequence : nullptr,
                         item.shared && !item.fed.empty() ? std::function<void()>(keep) : nullptr),
              engine);
    std::vector<double> kl, top1;
    for (std::size_t t = 0; t < reference.tokens.size(); ++t) {
      if (t > 0) want_room(mine.feed(reference.tokens[t - 1]), engine);
      const Shadow::Rows rows = shadow.take();
      if (rows.nonfinite > 0)
        throw NonFinite(
            rows.nonfinite,
            Error(Errc::model,
                  "got " + std::to_string(rows.nonfinite) +
                      " numbers of attention over all tokens that are not finite, the first of them in layer " +
                      std::to_string(rows.layer) + "; wanted none",
                  "sample " + std::to_string(i) + ", answer token " + std::to_string(t)));
      add_last(rows.mass, layers, f.mass);
      add_last(rows.page_recall, layers, f.page_recall);
      add_last(rows.output_error, layers, f.output_error);
      in.references->read(reference, static_cast<int>(t), model.config.vocab, full.data());
      kl.push_back(kl_divergence(full, mine.logits()));
      top1.push_back(top1_agreement(full, mine.logits()));
      want_finite(kl.back(), "a KL divergence", static_cast<std::int64_t>(i));
    }
    mine.close();
    history = item.fed;
    history.insert(history.end(), reference.tokens.begin(), reference.tokens.end());
    asked.push_back({history.size() - 1, 0});  // the answer's last token is fed with the next turn, if at all
    if (ends_answer(item, history.back(), *model.tokenizer)) history.pop_back();
    f.kl.insert(f.kl.end(), kl.begin(), kl.end());
    f.top1.insert(f.top1.end(), top1.begin(), top1.end());
    f.offsets.push_back(static_cast<std::int64_t>(f.kl.size()));
    auto& sample = out.samples[i];
    sample.kl = mean(kl);
    sample.top1 = mean(top1);
    if (item.forced.empty()) sample.first_divergence = divergence(outputs[i], reference.tokens);
    if (in.progress) in.progress("fidelity", static_cast<int>(i) + 1, static_cast<int>(items.size()));
  }
}

}  // namespace kvlab
