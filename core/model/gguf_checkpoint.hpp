// A GGUF file as a Checkpoint.
#pragma once
#include <filesystem>
#include <memory>

#include "model/checkpoint.hpp"

namespace kvlab {

std::unique_ptr<Checkpoint> open_gguf(const std::filesystem::path& path);

}  // namespace kvlab
