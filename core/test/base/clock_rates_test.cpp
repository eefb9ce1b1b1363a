#include "base/clock_rates.hpp"

#include <catch2/catch.hpp>
#include <cmath>

#include "base/cpu_use.hpp"
#include "support/child.hpp"

using namespace kvlab;

namespace {

void write(const test::Folder& root, const std::string& name, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(root / name).parent_path());
  root.write(name, text);
}

std::string processor(int number, const std::string& mhz) {
  return "processor\t: " + std::to_string(number) + "\nmodel name\t: CPU @ 9.9 MHz\ncpu MHz\t\t: " + mhz + "\n\n";
}

}  // namespace

TEST_CASE("the CPU's clock is the mean over the CPUs that we may use") {
  const std::vector<int> ours = allowed_cpus();
  const test::Folder root;
  std::string text = processor(100000, "9000");  // none of ours
  double sum = 0;
  for (const int cpu : ours) {
    text += processor(cpu, std::to_string(2000 + 100 * cpu) + ".5");
    sum += 2000.5 + 100 * cpu;
  }
  write(root, "proc/cpuinfo", text);
  CHECK(cpu_mhz(root / "") == Approx(sum / static_cast<double>(ours.size())));
}

TEST_CASE("the CPU's clock is that of sysfs where /proc/cpuinfo has none") {
  const test::Folder root;
  write(root, "proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.00\n");
  CHECK(std::isnan(cpu_mhz(root / "")));
  const std::string cpu = "sys/devices/system/cpu/cpu" + std::to_string(allowed_cpus().front());
  write(root, cpu + "/cpufreq/scaling_cur_freq", "1850000\n");
  CHECK(cpu_mhz(root / "") == Approx(1850));
}

TEST_CASE("the GPU's clock comes from NVML, of a whole GPU or of one with parts") {
  const std::string nvml = (test::build_root() / "lib/libfake_nvml.so").string();
  const GpuClock whole("00112233445566778899aabbccddeeff", nvml);
  const double first = whole.mhz();
  CHECK(first >= 1500);
  CHECK(whole.mhz() == first + 100);
  CHECK(GpuClock("ff112233445566778899aabbccddeeff", nvml).mhz() == first + 200);
}

TEST_CASE("the GPU's clock is unknown without a GPU, without NVML, and of a GPU that NVML does not know") {
  const std::string nvml = (test::build_root() / "lib/libfake_nvml.so").string();
  CHECK(std::isnan(GpuClock("", nvml).mhz()));
  CHECK(std::isnan(GpuClock("00112233445566778899aabbccddeeff", "/nowhere/libnvidia-ml.so.1").mhz()));
  CHECK(std::isnan(GpuClock("22112233445566778899aabbccddeeff", nvml).mhz()));
}
