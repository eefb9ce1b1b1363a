// Models with the shape of a real one and random weights, to measure speed: "synthetic/llama-3.1-8b". Their tokenizer
// takes text byte by byte, and only its length ends an answer.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "model/checkpoint.hpp"

namespace kvlab {

inline constexpr const char* synthetic_prefix = "synthetic/";

// The benches' default models: a small one on the CPU, one of the usual size on a GPU.
inline constexpr const char* small_synthetic = "synthetic/smollm2-135m";
inline constexpr const char* usual_synthetic = "synthetic/llama-3.1-8b";

const std::vector<std::string>& synthetic_names();  // "llama-3.1-8b", ...

// name: without the prefix. Weights follow from the name, tensor by tensor (model/random_weights.hpp): uniform with
// mean 0 and variance 1 / columns, so that activations stay of order one. Norms are 1 and biases 0. Errc::model for a
// name that is not known.
std::unique_ptr<Checkpoint> open_synthetic(const std::string& name);

}  // namespace kvlab
