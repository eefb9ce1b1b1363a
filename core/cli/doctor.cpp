#include "cli/doctor.hpp"

#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "base/backend.hpp"
#include "base/cache_folder.hpp"
#include "base/cpu.hpp"
#include "base/text.hpp"
#include "base/version.hpp"
#include "model/bundled.hpp"
#include "model/synthetic.hpp"
#include "ops/attend/attend_prompt.hpp"
#include "ops/linear/linear.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

double gigabytes(int pages) {
  const long n = sysconf(pages), size = sysconf(_SC_PAGESIZE);
  return n < 0 || size < 0 ? 0 : static_cast<double>(n) * static_cast<double>(size) / 1e9;
}

std::string instructions() {
  std::string text;
  const auto add = [&](bool has, const char* name) { text += fmt::format("{}{}", has ? "" : "no ", name); };
  add(has_avx2(), "avx2, ");
  add(has_avx512_bf16(), "avx512_bf16, ");
  add(has_amx_bf16(), "amx_bf16");
  return text;
}

std::string shape_text(const ModelConfig& c) {
  return fmt::format("{} layers, {} query heads, {} KV heads of {}", c.layers, c.heads, c.kv_heads, c.head_dim);
}

std::string shown(const fs::path& path) {
  std::error_code ec;
  return path.string() + (fs::exists(path, ec) ? "" : " (not there)");
}

}  // namespace

// The file begins with "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue ...". The version is the first
// word of digits with a dot.
std::string driver_version(const std::string& file) {
  std::ifstream in(file);
  std::string line, word;
  std::getline(in, line);
  for (std::istringstream words(line); words >> word;)
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  return "";
}

std::string models_text() {
  std::set<std::string> names{"smollm2"};
  std::error_code ec;
  for (fs::directory_iterator it(data_dir() / "models", ec), end; !ec && it != end; it.increment(ec))
    if (fs::exists(it->path() / "config.json") || fs::exists(it->path() / "adapter_config.json"))
      names.insert(it->path().filename().string());
  std::string text;
  for (const std::string& name : names) {
    const std::string model = "bundled/" + name;
    fs::path path;
    try {
      path = resolve_model_path(model, ".");
      const bool adapter = fs::exists(path / "adapter_config.json");
      text += fmt::format("{:<24} {}, {}\n", model,
                          adapter ? "an adapter" : shape_text(open_checkpoint(path)->config()), path.string());
    } catch (const Error& e) {
      text += fmt::format("{:<24} {}: {}\n", model, path.empty() ? "not there" : "not usable", e.message());
    }
  }
  for (const std::string& name : synthetic_names())
    text +=
        fmt::format("{:<24} {}, random weights\n", synthetic_prefix + name, shape_text(open_synthetic(name)->config()));
  return text;
}

std::string doctor_text(Registry& registry) {
  std::string text;
  const auto line = [&](const char* what, const std::string& value) {
    text += fmt::format("{:<14} {}\n", what, value);
  };
  line("kvlab", fmt::format("{} ({})", version(), git_commit()));
  line("CPU", cpu_name());
  line("instructions", instructions());
  line("threads", std::to_string(omp_get_max_threads()));
  line("memory", fmt::format("{:.1f} GB, {:.1f} GB free", gigabytes(_SC_PHYS_PAGES), gigabytes(_SC_AVPHYS_PAGES)));
  line("GPU", cuda_state());
  if (const std::string driver = driver_version(); !driver.empty()) line("driver", driver);
  if (cuda_backend()) {
    line("cuBLASLt", ops::cublaslt_state().text);
    line("cuDNN", ops::cudnn_state().text);
  }
  line("cache", shown(cache_folder()));
  line("data", shown(data_dir()));
  text += "\nmodels\n";
  const std::string models = models_text();
  for (std::size_t begin = 0; begin < models.size();) {
    const std::size_t end = models.find('\n', begin);
    text += "  " + models.substr(begin, end - begin + 1);
    begin = end + 1;
  }
  text += "\nplugins\n";
  const std::size_t usable = registry.list().size();
  for (const fs::path& place : registry.places()) text += "  " + shown(place) + "\n";
  text += fmt::format("  {} found\n", usable);
  for (const Diagnostic& d : registry.diagnostics())
    text += fmt::format("  {} {}: {}\n", d.shadowed ? "note:" : "broken:", d.path.string(), d.message);
  return text;
}

}  // namespace kvlab
