// Whether a policy, maybe behind its guard, makes the promise of kvlab/keeps_tokens.hpp.
#pragma once
#include <kvlab/keeps_tokens.hpp>
#include <kvlab/policy.hpp>

namespace kvlab {

class TokensStay {
 public:
  virtual ~TokensStay() = default;
  virtual bool tokens_stay() const = 0;
};

inline bool tokens_stay(const Policy& policy) {
  const auto* guard = dynamic_cast<const TokensStay*>(&policy);
  return guard ? guard->tokens_stay() : dynamic_cast<const KeepsTokens*>(&policy) != nullptr;
}

}  // namespace kvlab
