// An experiment file, validated and expanded: every task and policy with every parameter, and the cells to run.
#pragma once
#include <kvlab/dtype.hpp>

#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "experiment/policy_spec.hpp"
#include "experiment/sampling.hpp"
#include "experiment/workload.hpp"

namespace kvlab {

struct ModelSpec {
  std::string path;     // as written: "bundled/smollm2", or relative to the experiment's folder
  std::string adapter;  // a PEFT folder, written likewise; empty: none
  DType dtype = DType::bf16;
  std::string where;

  std::string name() const { return adapter.empty() ? path : path + " + " + adapter; }
};

// parts: latency, and the time of each step's parts, for which a GPU runs steps eagerly. The CPU's latency has them.
enum class Metric : std::uint8_t { score, fidelity, memory, latency, trace, parts };

// What replaces the choices of selectors and policies: page lists by `overlap` or by `trace`, and heads that turned.
struct InjectSpec {
  std::optional<double> overlap;  // share of a list that the head's list before had
  // The same of lists whose head chose last before the step before; beside overlap, of policies only.
  std::optional<double> rerank_overlap;
  std::optional<double> correction;  // share of the heads that choose again before attention; of policies only
  std::optional<double> drift;       // share of the leaders that a check finds drifted; of policies only
  std::string trace, cell;           // a result file, relative as data paths are, and the cell in it; "" = the only one
  std::string where;

  bool lists() const { return overlap || !trace.empty(); }
  bool used(const PolicySpec& policy) const {
    return (lists() && (policy.selector || policy.policy)) || ((correction || drift) && policy.policy);
  }
};

struct Experiment {
  std::string name;
  std::filesystem::path file, folder;  // relative paths in the file start at `folder`
  std::string text;                    // the file's bytes, then one "# --set ..." line per override
  std::vector<ModelSpec> models;
  std::string backend = "auto";  // auto | cpu | cuda
  std::string backend_where;
  std::vector<TaskSpec> tasks;          // axes expanded
  std::vector<PolicySpec> policies;     // axes and ablations expanded
  std::vector<PluginUse> profilers;     // in place of policies, for `kvlab profile`
  std::vector<WorkloadSpec> workloads;  // axes expanded; none = the tasks' samples, batch by batch
  std::vector<std::int64_t> seeds{0};
  int repeats = 1;        // the same cell measured again
  SamplingSpec sampling;  // of answers that no task forces
  std::set<Metric> metrics;
  std::filesystem::path output;          // relative to the current folder
  int batch = 1;                         // sequences at once; with a workload, at most
  int threads = 0;                       // at most most_threads(), 0 = as use_threads(0)
  std::int64_t equal_bytes = 0;          // each policy's budget is the one that holds so many bytes; 0 = it has its own
  std::int64_t device_memory = 0;        // cap in bytes, 0 = none
  std::int64_t host_memory = 0;          // the same of pages on the host
  std::string spill = "pressure";        // or "always": when pages leave the device for the host
  std::string page_copies = "kernel";    // or "memcpy": what a GPU copies pages to and from the host with
  int page_size = 16;                    // tokens per page, where a policy names none
  bool batch_invariant = false;          // on CUDA: other rows of a batch change no bit of a row
  int prefill_chunk = 0;                 // prompt tokens per chunk; 0 = the whole prompt, layer by layer
  int fidelity_tokens = 32;              // forced tokens per sample
  InjectSpec inject;                     // empty = none
  std::filesystem::path recording;       // in place of the model and the tasks' prompts; empty = none
  std::vector<std::string> plugin_path;  // absolute, or relative to the current folder

  std::filesystem::path resolve(const std::string& path) const;  // of a data path in the file
};

// Throws ExperimentError with every error found (Errc::config, plugin or unsupported), Error(Errc::io) when there is no
// such file. sets: "key=value", applied in order before anything is checked.
Experiment load_experiment(const std::string& path, const std::vector<std::string>& sets, const PluginCatalog& catalog);
Experiment read_experiment(yaml::Document document, const PluginCatalog& catalog);

// Reads `plugin_path` alone, because the catalog depends on it. ExperimentError if a place does not exist. Nothing when
// the key itself is wrong, which load_experiment reports.
std::vector<std::string> plugin_path_of(const std::string& path, const std::vector<std::string>& sets);
std::vector<std::string> plugin_path_of(yaml::Document document);

struct Cell {
  std::string id;                               // 16 hexadecimal digits
  std::size_t model = 0, task = 0, policy = 0;  // indices into the experiment's
  std::size_t workload = 0;                     // likewise, where there is any
  std::int64_t seed = 0;
  int repeat = 0;
  std::string params;  // JSON: everything resolved about the policy
};

// Hashes of the contents that a cell's id depends on besides its parameters.
struct Fingerprints {
  std::function<std::string(const ModelSpec&)> model;
  std::function<std::string(const PluginInfo&)> plugin;
  std::function<std::string(const std::filesystem::path&)> file;  // of a data file that a parameter names
};

inline constexpr std::size_t max_cells = 100'000;

// All cells: model by task by workload by policy by seed by repeat, in the file's order. If a text parameter names an
// existing file, the id depends on the file's contents. Errc::config when two cells are the same.
std::vector<Cell> cells(const Experiment& experiment, const PluginCatalog& catalog, const Fingerprints& fingerprints);

// Hashes of file contents, each file read once. A model counts by its path alone.
Fingerprints content_fingerprints();

// The cells as `kvlab check` prints them.
std::string cell_table(const Experiment& experiment, const std::vector<Cell>& cells);

const char* name_of(Metric metric);
std::string budget_text(const PolicySpec& policy);  // "512", "0.25", "64 MiB", "-"

}  // namespace kvlab
