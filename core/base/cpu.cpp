#include "base/cpu.hpp"

#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvlab {

#if defined(__x86_64__)
namespace {

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(unsigned leaf, unsigned sub) {
  Leaf l;
  if (!__get_cpuid_count(leaf, sub, &l.eax, &l.ebx, &l.ecx, &l.edx)) return {};
  return l;
}

bool bit(unsigned word, int n) { return (word >> n) & 1u; }

// The register states that the operating system saves (XCR0).
unsigned long long saved_states() {
  if (!bit(cpuid(1, 0).ecx, 27)) return 0;  // no OSXSAVE
  unsigned lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (static_cast<unsigned long long>(hi) << 32) | lo;
}

bool saves(unsigned long long mask) { return (saved_states() & mask) == mask; }

}  // namespace

bool has_avx2() {
  static const bool yes = [] {
    const Leaf one = cpuid(1, 0);
    return saves(0x6) && bit(one.ecx, 12) && bit(one.ecx, 29) && bit(cpuid(7, 0).ebx, 5);
  }();
  return yes;
}

bool has_avx512_bf16() {
  static const bool yes = [] {
    const unsigned seven = cpuid(7, 0).ebx;
    return has_avx2() && saves(0xe6) && bit(seven, 16) && bit(seven, 17) && bit(seven, 30) && bit(seven, 31) &&
           bit(cpuid(7, 1).eax, 5);
  }();
  return yes;
}

bool has_amx_bf16() {
  static const bool yes = [] {
    const unsigned seven = cpuid(7, 0).edx;
    return has_avx512_bf16() && saves(0x60000) && bit(seven, 22) && bit(seven, 24);
  }();
  return yes;
}
#else
bool has_avx2() { return false; }
bool has_avx512_bf16() { return false; }
bool has_amx_bf16() { return false; }
#endif

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("model name", 0) == 0) {
      const std::size_t at = line.find_first_not_of(" \t", line.find(':') + 1);
      return at == std::string::npos ? "unknown" : line.substr(at);
    }
  return "unknown";
}

}  // namespace kvlab
