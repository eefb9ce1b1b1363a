#include "base/clock_rates.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <vector>

#include "base/cpu_use.hpp"

namespace kvlab {
namespace {

constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

class Mean {
 public:
  void add(double value) {
    sum_ += value;
    ++count_;
  }
  double value() const { return count_ > 0 ? sum_ / count_ : unknown; }

 private:
  double sum_ = 0, count_ = 0;
};

// One read of /proc/cpuinfo samples all CPUs at once. sysfs may wait for each of them.
double of_cpuinfo(const std::filesystem::path& file, const std::vector<int>& cpus) {
  std::ifstream in(file);
  Mean mean;
  int cpu = -1;
  for (std::string line; std::getline(in, line);) {
    const std::size_t colon = line.find(':');
    if (colon == line.npos) continue;
    if (line.starts_with("processor")) cpu = std::atoi(line.c_str() + colon + 1);
    if (!line.starts_with("cpu MHz") || !std::binary_search(cpus.begin(), cpus.end(), cpu)) continue;
    if (const double mhz = std::atof(line.c_str() + colon + 1); mhz > 0) mean.add(mhz);
  }
  return mean.value();
}

double of_sysfs(const std::filesystem::path& folder, const std::vector<int>& cpus) {
  Mean mean;
  for (const int cpu : cpus) {
    std::ifstream in(folder / ("cpu" + std::to_string(cpu)) / "cpufreq/scaling_cur_freq");
    double khz = 0;
    if (in >> khz && khz > 0) mean.add(khz / 1000);
  }
  return mean.value();
}

std::string with_dashes(const std::string& uuid) {
  std::string text;
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    if (i == 8 || i == 12 || i == 16 || i == 20) text += '-';
    text += uuid[i];
  }
  return text;
}

template <class Function>
Function function(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

double cpu_mhz(const std::filesystem::path& root) {
  const std::vector<int> cpus = allowed_cpus();
  const double mhz = of_cpuinfo(root / "proc/cpuinfo", cpus);
  return mhz > 0 ? mhz : of_sysfs(root / "sys/devices/system/cpu", cpus);
}

// The library stays loaded: NVML does not like to be closed while a CUDA context lives.
GpuClock::GpuClock(const std::string& uuid, const std::string& library) {
  void* nvml = uuid.empty() ? nullptr : dlopen(library.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (!nvml) return;
  const auto init = function<int (*)()>(nvml, "nvmlInit_v2");
  const auto by_uuid = function<int (*)(const char*, void**)>(nvml, "nvmlDeviceGetHandleByUUID");
  const auto whole = function<int (*)(void*, void**)>(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle");
  const auto query = function<Query>(nvml, "nvmlDeviceGetClockInfo");
  if (!init || !by_uuid || !query || init() != 0) return;
  void* device = nullptr;
  if (by_uuid(("GPU-" + with_dashes(uuid)).c_str(), &device) != 0) {
    void* part = nullptr;
    if (!whole || by_uuid(("MIG-" + with_dashes(uuid)).c_str(), &part) != 0 || whole(part, &device) != 0) return;
  }
  device_ = device;
  query_ = query;
}

double GpuClock::mhz() const {
  constexpr int sm = 1;  // NVML_CLOCK_SM
  unsigned mhz = 0;
  return query_ && query_(device_, sm, &mhz) == 0 ? static_cast<double>(mhz) : unknown;
}

}  // namespace kvlab
