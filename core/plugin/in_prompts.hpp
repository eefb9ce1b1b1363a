// Asks a policy, or a wrapper of one, for the chunks of prompts in which it chooses what they attend to.
#pragma once
#include <kvlab/prompt_lists.hpp>

namespace kvlab {

// ChoosesInPrompts::prompt_chunk; 0 = the policy chooses nothing in prompts.
inline int prompt_chunk(const Policy& policy) {
  const auto* chooses = dynamic_cast<const ChoosesInPrompts*>(&policy);
  return chooses ? chooses->prompt_chunk() : 0;
}

}  // namespace kvlab
