#include "run/generate.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>
#include <kvlab/random.hpp>

#include <cstdio>
#include <optional>

#include "base/log.hpp"
#include "engine/engine.hpp"
#include "experiment/build_policy.hpp"
#include "experiment/experiment.hpp"
#include "model/bundled.hpp"
#include "model/checkpoint.hpp"
#include "run/device.hpp"
#include "run/nonfinite.hpp"
#include "run/policy_profile.hpp"
#include "run/sampling.hpp"

namespace kvlab {
namespace {

PolicySpec read_one_policy(const std::string& text, const PluginCatalog& catalog) {
  const yaml::Document document = yaml::parse_text(text, "--policy");
  Problems problems(document);
  auto policy = read_policy(document.root, Experiment{}.page_size, catalog, problems);
  problems.raise();
  return std::move(*policy);
}

// Prints the answer token by token.
Fit answer(const GenerateOptions& o, const std::vector<int>& prompt, Engine& engine) {
  const Tokenizer& tokenizer = *engine.model().tokenizer;
  std::vector<float> logits(static_cast<std::size_t>(engine.model().config.vocab));
  const auto view = View<float, 2>::dense(logits.data(), {1, engine.model().config.vocab});
  const int slot = engine.open();
  Random random(o.seed, 0);
  const Sampling how{o.temperature, o.top_p, o.top_k};
  Fit fit = engine.prefill(slot, prompt, true, view);
  for (int n = 0; fit == Fit::ok && n < o.max_new; ++n) {
    const int token = sample(logits, how, random.unit());
    if (tokenizer.is_eos(token)) break;
    const std::string bytes = tokenizer.token_bytes(token);
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    std::fflush(stdout);
    if (n + 1 < o.max_new) fit = engine.step({slot}, std::vector<int>{token}, view);
  }
  return fit;
}

}  // namespace

int generate(const GenerateOptions& o, const PluginCatalog& catalog) {
  const PolicySpec spec = read_one_policy(o.policy, catalog);
  const DType dtype = o.dtype == "f32" ? DType::f32 : o.dtype == "fp16" ? DType::f16 : DType::bf16;
  const Device device = choose_device(o.backend, {dtype}, "--backend");
  const auto model = load_model(*open_model(o.model, o.adapter, "."), dtype, o.model, device);
  const Tokenizer& tokenizer = *model->tokenizer;
  const std::vector<int> prompt =
      o.raw ? tokenizer.encode(o.prompt, true, false) : tokenizer.encode(tokenizer.chat_prompt(o.prompt), true, true);
  if (prompt.empty()) throw Error(Errc::config, "got an empty prompt, wanted text", "generate");
  const int tokens = static_cast<int>(prompt.size()) + o.max_new;
  if (tokens > model->config.context)
    throw Error(
        Errc::config,
        fmt::format("got {} tokens with the answer, wanted at most the model's {}", tokens, model->config.context),
        "generate");

  EngineOptions options;
  options.device = device;
  options.max_tokens = tokens;
  options.page_size = spec.page_size;
  options.budget = spec.budget;
  std::optional<Profile> profile;
  if (!spec.profile.empty())
    profile = read_policy_profile(resolve_data_path(spec.profile, "").string(), *model, spec.page_size, catalog);
  const auto policy = [&] { return build_policy(spec, catalog, profile ? &*profile : nullptr); };
  std::string error;
  try {
    Engine engine(model, policy(), options);
    if (answer(o, prompt, engine) != Fit::ok) error = "the sequence does not fit in memory";
  } catch (const NonFiniteStep& e) {
    error = located(model, policy, options, e).what();
  }
  std::fputc('\n', stdout);
  if (error.empty()) return 0;
  log::error(error);
  return 1;
}

}  // namespace kvlab
