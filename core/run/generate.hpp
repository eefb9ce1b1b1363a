// `kvlab generate`: one prompt, answered under a policy, printed as it comes.
#pragma once
#include <string>

#include "experiment/catalog.hpp"

namespace kvlab {

struct GenerateOptions {
  std::string prompt;
  std::string model = "bundled/smollm2";
  std::string adapter;  // PEFT folder to merge, none if empty
  std::string dtype = "bf16";
  std::string backend = "auto";  // auto | cpu | cuda
  std::string policy = "full";   // as an entry of `policies:`, e.g. "{NAME: {budget: {tokens: 256}}}"
  int max_new = 128;
  double temperature = 0, top_p = 1;
  int top_k = 0;  // 0 = all
  std::uint64_t seed = 0;
  bool raw = false;  // the prompt as it is, without the chat template
};

// Exit code: 0, or 1 when the sequence does not fit in memory or its numbers are not finite.
int generate(const GenerateOptions& options, const PluginCatalog& catalog);

}  // namespace kvlab
