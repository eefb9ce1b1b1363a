// The clocks of CPU and GPU at this moment, in MHz. NaN = unknown.
#pragma once
#include <filesystem>
#include <string>

namespace kvlab {

// The mean over the CPUs that this process may use. root: of /proc/cpuinfo, else of sysfs (cpufreq). Virtual machines
// often show the host's nominal rate.
double cpu_mhz(const std::filesystem::path& root = "/");

// The clock of a GPU's multiprocessors (SM), through NVML, which is loaded here. It takes milliseconds.
class GpuClock {
 public:
  // uuid: 32 hex digits, or "" = no GPU. A part of a GPU (MIG) has its GPU's clock.
  explicit GpuClock(const std::string& uuid, const std::string& library = "libnvidia-ml.so.1");
  double mhz() const;

 private:
  using Query = int (*)(void* device, int clock, unsigned* mhz);
  void* device_ = nullptr;
  Query query_ = nullptr;
};

}  // namespace kvlab
