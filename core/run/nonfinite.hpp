// A pass ends at numbers that are not finite. A replay of the sequence, observed layer by layer, then finds where they
// began. A pass of finite numbers pays nothing for this.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "engine/engine.hpp"

namespace kvlab {

// Replays the sequences of `seen` one by one. Returns an error with the layer, the token and the kind of number:
// queries, keys, values, attention mass, attention output or logits. Its count() has all such numbers of that call. The
// engine that threw `seen` should have freed its memory. Returns `seen` itself where the replay fails or finds nothing.
NonFinite located(const std::shared_ptr<const Model>& model, const std::function<std::shared_ptr<Policy>()>& policy,
                  EngineOptions options, const NonFiniteStep& seen);

// Throws NonFinite for a measured number of a sample that is not finite. what: its name in the message, e.g. "a score".
void want_finite(double value, const std::string& what, std::int64_t sample);

}  // namespace kvlab
