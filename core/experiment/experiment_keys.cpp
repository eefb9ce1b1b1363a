#include "experiment/experiment_keys.hpp"

#include "base/threads.hpp"

namespace kvlab {
namespace {

enum class Id { part, no_part };

template <class T>
ExperimentKey plain(const char* name, T Experiment::*field, double low, double high, Id id, const char* help) {
  ExperimentKey key{name, help};
  key.plain = make_param(name, Experiment{}.*field, low, high, help);
  key.set = [=](Experiment& e, const Params& p) { e.*field = p.get<T>(name); };
  key.get = [=](const Experiment& e) { return make_param(name, e.*field, low, high, "").value; };
  key.in_id = id == Id::part;
  return key;
}

}  // namespace

const std::vector<ExperimentKey>& experiment_keys() {
  static const std::vector<ExperimentKey> keys = {
      {"experiment", "name of the run; default: the file's name"},
      {"model", "GGUF file or safetensors folder, and the run's dtype"},
      {"backend", "where the model runs"},
      {"tasks", "what is asked"},
      {"policies", "what is compared"},
      {"sweep", "NAME.key: list of values"},
      {"ablate", "NAME: components switched off in turn, or all"},
      plain("repeats", &Experiment::repeats, 1, 1000, Id::no_part, "times that each cell is measured"),
      {"seed", "of tasks and sampling"},
      {"sampling", "answers are drawn, several to a question, in place of the most likely tokens"},
      {"metrics", "what is measured"},
      {"output", "HDF5 file, from the current folder"},
      plain("batch", &Experiment::batch, 1, 4096, Id::part, "sequences at once"),
      plain("threads", &Experiment::threads, 0, most_threads(), Id::part,
            "0 = OMP_NUM_THREADS, else the cores free to us"),
      {"equal_bytes", "in place of budgets: each policy gets the one with which it holds so many bytes on the device"},
      {"device_memory", "cap of the cache on the device"},
      {"host_memory", "cap of the host tier"},
      {"spill", "when pages leave the device for the host: under pressure of its memory, or always"},
      {"page_copies", "on a GPU, pages that place edits move are copied by a kernel, or with a memcpy for each"},
      plain("page_size", &Experiment::page_size, 1, 1024, Id::no_part, "tokens per page, where a policy names none"),
      plain("prefill_chunk", &Experiment::prefill_chunk, 0, 1 << 24, Id::part,
            "prompt tokens per chunk, 0 = the whole prompt, layer by layer"),
      {"fidelity", "forced tokens per sample"},
      {"plugin_path", "folders or libraries that are searched first"},
      {"workload", "requests that arrive and are batched continuously, in place of batches of samples"},
      {"inject", "page lists, corrections and drift in place of those that selectors and policies find"},
      plain("batch_invariant", &Experiment::batch_invariant, -any, any, Id::part,
            "on CUDA: other rows of a batch change no bit of a row; slower"),
      {"profilers", "what `kvlab profile` notes of the full cache, in place of policies"},
  };
  return keys;
}

std::vector<std::string> experiment_key_names() {
  std::vector<std::string> names;
  for (const ExperimentKey& key : experiment_keys()) names.push_back(key.name);
  return names;
}

}  // namespace kvlab
