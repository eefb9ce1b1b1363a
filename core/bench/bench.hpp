// `kvlab bench` times ops and whole models, and holds them against the rates that it measures on this machine in the
// same run.
#pragma once
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace kvlab::bench {

// Bytes per second that all OpenMP threads read together from memory: the best of several passes over 1 GiB.
double measure_read_rate();

// Bytes per second that all OpenMP threads read and write together in a copy: the best of several of 256 MiB.
double measure_copy_rate();

struct GemmRate {
  double flop_per_s = 0;
  std::string kernel;  // the fastest one here
};
// The fastest bf16 matrix product of this machine: oneDNN's bf16 where the CPU has it, otherwise the better of our
// bf16 kernel and oneDNN's f32 product.
GemmRate measure_gemm_rate();

struct Ceilings {
  double read_bytes_per_s = 0;  // the better of the probes before and after the ops
  double read_before = 0, read_after = 0;
  GemmRate gemm;
  int threads = 0;
};

// One measured case. A case that reads memory is held against the read rate, one that computes against the GEMM rate.
struct Line {
  std::string op, shape, kernel;
  double seconds = 0, best = 0;  // median and minimum of the runs
  double bytes = 0, flops = 0;   // what a run must move and compute
  bool reads = false;
  double overhead = -1;  // share of a decode step's time in which no kernel ran; -1 = not measured
  // Bytes per second of a plain copy in the same direction, or within memory; > 0: the case is held against it.
  double copy_rate = 0;
  // The decode step that ran while the line's work ran again and again; `seconds` is then the mean. Empty = none did.
  struct Beside {
    std::string step;
    double alone = 0, beside = 0;  // median seconds of a step
    double slowdown() const { return beside / alone - 1; }
  } beside;

  double rate() const { return (reads ? bytes : flops) / seconds; }
  double percent(const Ceilings& c) const {
    return 100 * rate() / (copy_rate > 0 ? copy_rate : reads ? c.read_bytes_per_s : c.gemm.flop_per_s);
  }
};

struct Report {
  std::string device;  // the GPU; empty: the CPU
  Ceilings ceilings;
  std::vector<Line> lines;
};

// The ops that have timed cases; then decode and prefill, which are whole models.
const std::vector<std::string>& op_names();

// The model and shape of decode, prefill and the steps beside copies. Empty and 0 mean random weights. They have the
// shape of SmolLM2-135M at 2048 tokens on the CPU, and that of Llama-3.1-8B at the contexts of the design's targets on
// the GPU. The steps beside copies have 8 sequences of 10240 tokens.
struct ModelChoice {
  std::string model;  // as an experiment names it
  int batch = 0, context = 0;
};

// Compares the timed cases of the named ops, or of all, with their references. only: of a shape or kernel that holds
// this text; decode and prefill know none. Errc::config where no case does. Calls `said` with each one's op, shape
// and differences (empty = equal). Returns false if one differs. Large cases take seconds.
bool check(const std::vector<std::string>& names, bool cuda,
           const std::function<void(const std::string& op, const std::string& shape, const std::string& differs)>& said,
           const std::string& only = {});

// Runs the named ops, or all of them when no name is given. On the GPU it runs those that have cases there, with a cold
// L2 cache for ops. Throws Errc::config for another name, and the errors of model and engine for a choice. only: as for
// check.
Report run(std::vector<std::string> names, bool cuda = false, const ModelChoice& choice = {},
           const std::string& only = {});

std::string table(const Report& r);
nlohmann::json to_json(const Report& r);

}  // namespace kvlab::bench
