// Where models and data live: paths as an experiment writes them -> files.
#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "model/checkpoint.hpp"

namespace kvlab {

// The data folder, which holds models/: $KVLAB_DATA_DIR, else that of the bundle around this library, else the one that
// the build was given (KVLAB_DATA_DIR).
std::filesystem::path data_dir();

// "bundled/smollm2" -> the cached GGUF (Errc::network says what to do if it is missing or another file);
// "bundled/NAME" -> <data_dir>/models/NAME; anything else is relative to base_dir. Errc::model if nothing is there.
std::filesystem::path resolve_model_path(const std::string& path, const std::filesystem::path& base_dir);

// The model at `path` ("synthetic/NAME": model/synthetic.hpp) with the PEFT adapter at `adapter` merged into it ("":
// none). Both paths are written as for resolve_model_path.
std::unique_ptr<Checkpoint> open_model(const std::string& path, const std::string& adapter,
                                       const std::filesystem::path& base_dir);

// "bundled/NAME" -> <data_dir>/NAME; anything else is relative to base_dir. The file need not exist.
std::filesystem::path resolve_data_path(const std::string& path, const std::filesystem::path& base_dir);

}  // namespace kvlab
