// A PEFT low-rank adapter (LoRA, arXiv 2106.09685) merged into the model that it was trained on: rows are read as
// W + (alpha / r) B A, with alpha / sqrt(r) where the adapter is rank-stabilized.
#pragma once
#include <filesystem>
#include <memory>

#include "model/checkpoint.hpp"

namespace kvlab {

// folder: adapter_config.json and adapter_model.safetensors. Every target module of every layer must have both of its
// matrices, of the right rank and shape, and nothing else may be in the file: Errc::model names the tensor or the key.
// Errc::unsupported for what is no plain LoRA (DoRA, biases, whole modules saved beside it, embeddings).
std::unique_ptr<Checkpoint> merge_adapter(std::unique_ptr<Checkpoint> base, const std::filesystem::path& folder);

}  // namespace kvlab
