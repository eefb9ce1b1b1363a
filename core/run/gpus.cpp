#include "run/gpus.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>

namespace kvlab {
namespace {

// The driver's functions that count and name devices.
struct Driver {
  int (*count)(int*) = nullptr;
  int (*device)(int*, int) = nullptr;
  int (*uuid)(unsigned char*, int) = nullptr;
  bool usable = false;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!library) return;
    const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
    count = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
    device = reinterpret_cast<int (*)(int*, int)>(dlsym(library, "cuDeviceGet"));
    void* name = dlsym(library, "cuDeviceGetUuid_v2");  // of a part of a GPU, too
    uuid = reinterpret_cast<int (*)(unsigned char*, int)>(name ? name : dlsym(library, "cuDeviceGetUuid"));
    usable = init && count && device && uuid && init(0) == 0;
  }
};

}  // namespace

std::string gpus_folder(const std::string& folder) { return folder + "/gpus"; }

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  if (const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES")) {
    std::istringstream words(chosen);
    for (std::string name; std::getline(words, name, ',') && name != "-1";)
      if (!name.empty()) names.push_back(name);
    return names;
  }
  const Driver driver;
  int count = 0;
  if (!driver.usable || driver.count(&count) != 0) return names;
  for (int i = 0; i < count; ++i) names.push_back(std::to_string(i));
  return names;
}

std::string gpu_uuid() {
  const Driver driver;
  int device = 0;
  unsigned char bytes[16] = {};
  if (!driver.usable || driver.device(&device, 0) != 0 || driver.uuid(bytes, device) != 0) return "";
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

bool measures_times(const Experiment& e) { return e.metrics.count(Metric::latency) || e.metrics.count(Metric::parts); }

Claim claim_gpu(const std::string& uuid, const std::string& folder) {
  auto claim = Claim::take(gpus_folder(folder), uuid);
  if (!claim)
    throw Error(Errc::config, "got the GPU of another worker, wanted a GPU for each worker: the metrics measure times",
                "GPU " + uuid);
  return std::move(*claim);
}

bool time_on_gpu(const std::vector<Experiment>& all) {
  return std::any_of(all.begin(), all.end(),
                     [](const Experiment& e) { return e.backend == "cuda" && measures_times(e); });
}

std::optional<Claim> claim_own_gpu(const std::string& folder, bool strict) {
  const std::string uuid = gpu_uuid();
  if (uuid.empty()) return std::nullopt;
  try {
    return claim_gpu(uuid, folder);
  } catch (const NoLocks&) {
    if (strict) throw;
    return std::nullopt;
  }
}

}  // namespace kvlab
