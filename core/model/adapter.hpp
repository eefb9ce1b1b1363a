// A PEFT low-rank adapter (LoRA, arXiv 2106.09685) merged into the model that it was trained on. Rows are read as
// W + (alpha / r) B A, with alpha / sqrt(r) if the adapter is rank-stabilized.
#pragma once
#include <filesystem>
#include <memory>

#include "model/checkpoint.hpp"

namespace kvlab {

// folder: holds adapter_config.json and adapter_model.safetensors. Every target module of every layer must have both of
// its matrices with the right rank and shape. The file may hold nothing else. Errc::model names the tensor or the key.
// Errc::unsupported for anything but plain LoRA (DoRA, biases, whole modules saved beside it, embeddings).
std::unique_ptr<Checkpoint> merge_adapter(std::unique_ptr<Checkpoint> base, const std::filesystem::path& folder);

}  // namespace kvlab
