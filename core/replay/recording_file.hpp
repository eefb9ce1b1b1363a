// A recording: what the full cache computed on some cases, as a sealed HDF5 file. README.md has the layout.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "result/results.hpp"

namespace kvlab {

inline constexpr int recording_schema = 1;

struct RecordingHead {
  results::RunInfo info;  // experiment_yaml is the experiment that was recorded
  // The model without weights, tokenizer and the widths that only weights have.
  std::shared_ptr<const Model> model;
};

// One question: a prompt, tokens that are fed after it, and the full cache's answer.
struct RecordedCase {
  std::string task;  // its resolved entry, as to_json(TaskSpec) writes it
  std::int64_t seed = 0;
  int sample = 0, question = 0;
  bool shared = false;  // Item::shared
  int max_new = 0;      // Item::max_new
  std::string sha256;   // Item::sha256
  std::vector<int> prompt, fed, answer;

  // The answer's last token was never fed.
  std::int64_t steps() const { return static_cast<std::int64_t>(fed.size() + answer.size()) - 1; }
  std::int64_t tokens() const { return static_cast<std::int64_t>(prompt.size()) + steps(); }
};

// The numbers of a case. Queries and keys are rotated by text position.
struct RecordedLayers {
  std::vector<float> prompt_queries;  // [layer, prompt token, query head, head_dim], in the file in the model's dtype
  std::vector<float> step_queries;    // [layer, decode step, query head, head_dim], in the file in f32
  std::vector<float> keys, values;    // [layer, token, KV head, head_dim], in the file in the model's dtype
  // Those of the prompt's tokens again, as pages take them: bf16 [layer, KV head, prompt token, head_dim]. Read from a
  // file in bf16; else empty.
  std::vector<std::uint16_t> key_bits, value_bits;
  std::vector<float> prompt_mass;  // [layer, query head, prompt token] summed over the prompt's queries
};

// Bytes of a case's numbers, before any are deflated.
std::int64_t case_bytes(const RecordingHead& head, std::int64_t prompt, std::int64_t steps);

// Calls next(i, case, layers) for each of `count` cases, in order, and writes what it fills in. The file appears when
// all are there. It grows in memory until then. Throws as results::write_sealed does.
void write_recording(const std::string& path, const RecordingHead& head, std::size_t count,
                     const std::function<void(std::size_t, RecordedCase&, RecordedLayers&)>& next);

// Reads the head and the cases. Their numbers stay in the file until they are asked for.
class Recording {
 public:
  // Errc::result_file for a file that is cut, changed, of another kind or schema, or that lacks an array or a layer.
  explicit Recording(const std::string& path);
  const std::string& path() const { return path_; }
  const RecordingHead& head() const { return head_; }
  const std::vector<RecordedCase>& cases() const { return cases_; }
  // They stay in memory for later calls, until all that do take 1 GiB.
  std::shared_ptr<const RecordedLayers> layers(std::size_t number) const;
  // The numbers of the cases of a task and a seed, in order.
  std::vector<std::size_t> cases_of(const std::string& task, std::int64_t seed) const;

 private:
  std::string path_;
  RecordingHead head_;
  std::vector<RecordedCase> cases_;
  mutable std::map<std::size_t, std::shared_ptr<const RecordedLayers>> kept_;  // by number; h5::lock() guards both
  mutable std::int64_t kept_bytes_ = 0;
};

}  // namespace kvlab
