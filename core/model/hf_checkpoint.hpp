// A Hugging Face folder as a Checkpoint: config.json, safetensors, tokenizer.
#pragma once
#include <filesystem>
#include <memory>

#include "model/checkpoint.hpp"

namespace kvlab {

std::unique_ptr<Checkpoint> open_hf_folder(const std::filesystem::path& folder);

// Reads the text of a config.json. where: the file. Errc::model, Errc::unsupported.
ModelConfig read_hf_config(std::string_view json, const std::string& where);

}  // namespace kvlab
