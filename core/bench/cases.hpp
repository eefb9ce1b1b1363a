// The cases of `kvlab bench`. Ops on the CPU have the shapes of SmolLM2-135M.
#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "base/stop.hpp"
#include "bench/bench.hpp"
#include "cases/paged_fixture.hpp"
#include "cases/recall.hpp"

namespace kvlab::bench {

struct Times {
  double median = 0, best = 0;
};

// Times at least `runs` runs, and more until they took a quarter of a second. One run before them is not counted.
template <class F>
Times time_runs(int runs, const F& f) {
  using Clock = std::chrono::steady_clock;
  f();
  std::vector<double> t;
  double total = 0;
  while (static_cast<int>(t.size()) < runs || (total < 0.25 && t.size() < 10000)) {
    stop::check();
    const auto begin = Clock::now();
    f();
    t.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    total += t.back();
  }
  std::sort(t.begin(), t.end());
  return {t[t.size() / 2], t.front()};
}

using cases::randoms;

// Whole models: one case per shape of the setup.
struct ModelShape {
  int batch, context;  // sequences; tokens that each holds (decode) or prefills (prefill)
};
struct ModelSetup {
  std::string model;
  std::vector<ModelShape> shapes;
};
std::vector<Line> decode_cases(const ModelSetup& s);
std::vector<Line> prefill_cases(const ModelSetup& s);

// Cases on the GPU. Ops have the shapes of Llama-3.1-8B.
std::vector<Line> cuda_decode_cases(const ModelSetup& s);
std::vector<Line> cuda_prefill_cases(const ModelSetup& s);
// Ways to recall 64 MiB of pages; each runs again and again while decode steps of the first shape run.
std::vector<cases::Recall::Of> recalls_beside_steps();
std::string shape_of(const cases::Recall::Of& of);  // as their lines name it
std::vector<Line> cuda_recall_cases(const ModelSetup& s, const std::vector<cases::Recall::Of>& ways);
// Loads the model and calls `use` for i from 0 to times - 1, each time with a cache of its own. `steps` runs decode
// steps as graphs and returns the median of their seconds. It may be called three times.
void cuda_steps(const ModelSetup& s, int times,
                const std::function<void(int i, const std::function<double()>& steps)>& use);
// The rate of cuBLASLt for a large product of bf16 matrices.
GemmRate cuda_gemm_rate();
// Seconds that the device takes for the work, by events.
double cuda_seconds(Stream s, const std::function<void()>& work);
// Bytes per second of a plain copy between pinned and device memory.
double cuda_copy_rate(Stream s, bool to_device);
// Bytes per second that a plain copy within device memory reads and writes.
double cuda_inner_copy_rate(Stream s);

}  // namespace kvlab::bench
