// What a pass does about numbers that are not finite: it ends, and a replay of the sequence, watched layer by layer,
// says where they began. Nothing of this costs a pass of good numbers anything.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "engine/engine.hpp"

namespace kvlab {

// The same as `seen` with the layer, the token and what it was of: queries, keys, values, attention mass, attention
// output or logits. count() is of all numbers of that call that are not finite. Replays the sequences one by one, so
// memory of the engine that `seen` comes from should be free again. Where that fails or shows nothing, `seen` as it is.
NonFinite located(const std::shared_ptr<const Model>& model, const std::function<std::shared_ptr<Policy>()>& policy,
                  EngineOptions options, const NonFiniteStep& seen);

// A measured number of a sample; what it is says the message: "a score".
void want_finite(double value, const std::string& what, std::int64_t sample);

}  // namespace kvlab
