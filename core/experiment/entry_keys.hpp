// The keys that an experiment's entries take beside their plugin's own parameters, for people and editors.
#pragma once
#include <string>
#include <vector>

namespace kvlab {

struct EntryKey {
  const char *name, *form, *help;
};

inline constexpr const char* unsplit_budget = "{tokens: N | ratio: R | bytes: B}";  // where nothing takes a split

// Keys of every entry under `policies:`. NAME stands for NAME or {NAME: {...}} with its parameters.
inline const std::vector<EntryKey>& policy_keys() {
  static const std::vector<EntryKey> keys = {
      {"policy", "NAME", "a whole life cycle"},
      {"scorer", "NAME", "how important each token is"},
      {"selector", "NAME", "which pages attention reads in a step"},
      {"pruner", "NAME", "which of the tokens that a selector or a policy names attention reads"},
      {"rescorer", "NAME", "ranks a scorer's tokens anew when a prompt ends"},
      {"budget", "{tokens: N | ratio: R | bytes: B, split: NAME}",
       "tokens per KV head, a ratio of the tokens seen, or device bytes per sequence; without it, everything"},
      {"schedule", "{prefill: true, every: N}", "when a scorer evicts: at the prompt's end, and each N decode steps"},
      {"codec", "NAME", "how pages store K and V"},
      {"placement", "{tier: device | host, resident: N, codec: NAME}",
       "where pages live; resident = tokens per KV head that stay on the device"},
      {"page_size", "N", "tokens per page"},
      {"profile", "FILE", "what `kvlab profile` wrote about the model, for a method that reads it"},
  };
  return keys;
}

// Keys of every entry under `tasks:`.
inline const std::vector<EntryKey>& task_keys() {
  static const std::vector<EntryKey> keys = {
      {"question", "prompt | decode", "does the policy see the question before it compresses"},
      {"questions", "N", "questions over one context; each starts from the cache as it was after the context"},
      {"turns", "N", "questions after each of these, one after the other: earlier answers stay in the cache"},
      {"seed", "N", "of the samples, in place of the experiment's"},
      {"metric", "NAME", "scores the answers, in place of the task's; `kvlab list metrics` has the names"},
  };
  return keys;
}

}  // namespace kvlab
