#include "replay/recording_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <kvlab/error.hpp>

#include <utility>

#include "base/memory_map.hpp"
#include "result/cell_file.hpp"
#include "result/sealed.hpp"

namespace kvlab {
namespace {

constexpr const char* kind = "recording";
constexpr std::int64_t most_kept = std::int64_t{1} << 30;  // bytes of cases in memory

std::string group_of(std::size_t number) { return fmt::format("cases/{:06}", number); }

// The numbers of the configuration that replay needs.
constexpr std::pair<const char*, int ModelConfig::*> config_numbers[] = {
    {"layers", &ModelConfig::layers},
    {"query_heads", &ModelConfig::heads},
    {"kv_heads", &ModelConfig::kv_heads},
    {"head_dim", &ModelConfig::head_dim},
    {"vocab", &ModelConfig::vocab},
    {"context", &ModelConfig::context},
    {"sliding_window", &ModelConfig::sliding_window}};

std::vector<std::uint16_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint16_t> bits;
  bits.reserve(values.size());
  for (const float x : values) bits.push_back(bf16(x).bits);
  return bits;
}

std::vector<float> values_of(const std::vector<std::uint16_t>& bits) {
  std::vector<float> values;
  values.reserve(bits.size());
  prefer_huge_pages_within(values.data(), static_cast<std::int64_t>(bits.size() * sizeof(float)));
  for (const std::uint16_t b : bits) {
    bf16 x;
    x.bits = b;
    values.push_back(static_cast<float>(x));
  }
  return values;
}

// Bits [layer, token, KV head, head_dim] of the first `tokens` tokens, as RecordedLayers::key_bits has them.
std::vector<std::uint16_t> by_head(const std::vector<std::uint16_t>& bits, std::int64_t tokens, const ModelConfig& c) {
  const std::int64_t layer_size = std::ssize(bits) / c.layers, row = std::int64_t{c.kv_heads} * c.head_dim;
  std::vector<std::uint16_t> out;
  out.reserve(static_cast<std::size_t>(c.layers * tokens * row));
  prefer_huge_pages_within(out.data(), static_cast<std::int64_t>(out.capacity() * sizeof out[0]));
  for (int layer = 0; layer < c.layers; ++layer)
    for (int head = 0; head < c.kv_heads; ++head)
      for (std::int64_t t = 0; t < tokens; ++t) {
        const auto from = bits.begin() + layer * layer_size + t * row + std::int64_t{head} * c.head_dim;
        out.insert(out.end(), from, from + c.head_dim);
      }
  return out;
}

// The extents of a case's arrays.
struct Extents {
  Extents(const RecordingHead& head, std::int64_t prompt, std::int64_t steps) {
    const ModelConfig& c = head.model->config;
    prompt_queries = {c.layers, prompt, c.heads, c.head_dim};
    step_queries = {c.layers, steps, c.heads, c.head_dim};
    entries = {c.layers, prompt + steps, c.kv_heads, c.head_dim};
    mass = {c.layers, c.heads, prompt};
  }
  Extents(const RecordingHead& head, const RecordedCase& c)
      : Extents(head, static_cast<std::int64_t>(c.prompt.size()), c.steps()) {}
  std::vector<std::int64_t> prompt_queries, step_queries, entries, mass;
};

std::int64_t product(const std::vector<std::int64_t>& extent) {
  std::int64_t n = 1;
  for (const std::int64_t of : extent) n *= of;
  return n;
}

void write_head(const h5::File& file, const RecordingHead& head) {
  const Model& model = *head.model;
  results::write_info(file, head.info);
  file.set_attribute(".", "kind", kind);
  file.set_attribute(".", "recording_schema", recording_schema);
  file.set_attribute(".", "model", model.name);
  file.set_attribute(".", "model_fingerprint", model.fingerprint);
  file.set_attribute(".", "dtype", name_of(model.dtype));
  file.set_attribute(".", "synthetic", std::int64_t{model.synthetic});
  for (const auto& [name, member] : config_numbers) file.set_attribute(".", name, std::int64_t{model.config.*member});
  file.write("inverse_frequencies", model.inv_freq, {static_cast<std::int64_t>(model.inv_freq.size())}, "rad/token");
}

void write_case(const h5::Location& at, const RecordingHead& head, const RecordedCase& c, const RecordedLayers& l) {
  const Extents extents(head, c);
  at.set_attribute(".", "task", c.task);
  at.set_attribute(".", "seed", c.seed);
  at.set_attribute(".", "sample", std::int64_t{c.sample});
  at.set_attribute(".", "question", std::int64_t{c.question});
  at.set_attribute(".", "shared", std::int64_t{c.shared});
  at.set_attribute(".", "max_new", std::int64_t{c.max_new});
  at.set_attribute(".", "prompt_sha256", c.sha256);
  for (const auto& [name, tokens] : {std::pair{"prompt", &c.prompt}, {"fed", &c.fed}, {"answer", &c.answer}})
    at.write(name, std::vector<std::int32_t>(tokens->begin(), tokens->end()),
             {static_cast<std::int64_t>(tokens->size())}, "token id");
  const auto write = [&](const char* name, const std::vector<float>& values, const std::vector<std::int64_t>& extent) {
    if (head.model->dtype == DType::bf16)
      at.write_blocks(name, bits_of(values), extent, "bf16 bits");
    else
      at.write_blocks(name, values, extent, "");
  };
  write("prompt_queries", l.prompt_queries, extents.prompt_queries);
  write("keys", l.keys, extents.entries);
  write("values", l.values, extents.entries);
  at.write_blocks("step_queries", l.step_queries, extents.step_queries, "");
  at.write_blocks("prompt_mass", l.prompt_mass, extents.mass, "probability");
}

RecordedCase read_case(const h5::Location& at) {
  RecordedCase c;
  c.task = at.text_attribute(".", "task");
  c.seed = at.integer_attribute(".", "seed");
  c.sample = static_cast<int>(at.integer_attribute(".", "sample"));
  c.question = static_cast<int>(at.integer_attribute(".", "question"));
  c.shared = at.integer_attribute(".", "shared") != 0;
  c.max_new = static_cast<int>(at.integer_attribute(".", "max_new"));
  c.sha256 = at.text_attribute(".", "prompt_sha256");
  for (const auto& [name, tokens] : {std::pair{"prompt", &c.prompt}, {"fed", &c.fed}, {"answer", &c.answer}}) {
    const std::vector<std::int32_t> ids = at.read_i32(name, 1);
    tokens->assign(ids.begin(), ids.end());
  }
  return c;
}

void want_extents(const h5::Location& at, const RecordingHead& head, const RecordedCase& c, const std::string& where) {
  if (c.prompt.empty() || c.answer.empty())
    throw Error(Errc::result_file, "got a case without prompt or answer, wanted both", where);
  const Extents wanted(head, c);
  for (const auto& [name, extent] : {std::pair{"prompt_queries", &wanted.prompt_queries},
                                     {"step_queries", &wanted.step_queries},
                                     {"keys", &wanted.entries},
                                     {"values", &wanted.entries},
                                     {"prompt_mass", &wanted.mass}}) {
    if (!at.has(name)) throw Error(Errc::result_file, fmt::format("got no array '{}', wanted it", name), where);
    if (const auto got = at.extent(name); got != *extent)
      throw Error(Errc::result_file,
                  fmt::format("got an array '{}' of [{}], wanted [{}]: the first number counts layers", name,
                              fmt::join(got, ", "), fmt::join(*extent, ", ")),
                  where);
  }
}

std::shared_ptr<const Model> read_model(const h5::File& file, const std::string& path) {
  auto model = std::make_shared<Model>();
  model->name = file.text_attribute(".", "model");
  model->fingerprint = file.text_attribute(".", "model_fingerprint");
  model->synthetic = file.integer_attribute(".", "synthetic") != 0;
  const std::string dtype = file.text_attribute(".", "dtype");
  if (dtype != name_of(DType::bf16) && dtype != name_of(DType::f32))
    throw Error(Errc::result_file, "got dtype " + dtype + ", wanted bf16 or f32", path);
  model->dtype = dtype == name_of(DType::bf16) ? DType::bf16 : DType::f32;
  ModelConfig& c = model->config;
  for (const auto& [name, member] : config_numbers) {
    const std::int64_t number = file.integer_attribute(".", name);
    if (number < 0 || number > 1 << 24)
      throw Error(Errc::result_file, fmt::format("got {} {}, wanted 0 to 2^24", name, number), path);
    c.*member = static_cast<int>(number);
  }
  if (c.layers < 1 || c.kv_heads < 1 || c.heads < 1 || c.heads % c.kv_heads != 0 || c.head_dim < 2 ||
      c.head_dim % 2 != 0)
    throw Error(Errc::result_file,
                fmt::format("got {} layers, {} query heads, {} KV heads and head_dim {}, wanted a model's shape",
                            c.layers, c.heads, c.kv_heads, c.head_dim),
                path);
  std::vector<std::int64_t> extent;
  model->inv_freq = file.read_f32("inverse_frequencies", 1, &extent);
  if (extent[0] != c.head_dim / 2)
    throw Error(Errc::result_file, fmt::format("got {} frequencies, wanted {}", extent[0], c.head_dim / 2), path);
  return model;
}

}  // namespace

std::int64_t case_bytes(const RecordingHead& head, std::int64_t prompt, std::int64_t steps) {
  const Extents e(head, prompt, steps);
  constexpr std::int64_t number = sizeof(float);
  return number * (product(e.step_queries) + product(e.mass)) +
         static_cast<std::int64_t>(size_of(head.model->dtype)) * (product(e.prompt_queries) + 2 * product(e.entries));
}

void write_recording(const std::string& path, const RecordingHead& head, std::size_t count,
                     const std::function<void(std::size_t, RecordedCase&, RecordedLayers&)>& next) {
  const auto lock = h5::lock();
  results::write_sealed(path, [&](const h5::File& file) {
    write_head(file, head);
    file.create_group("cases");
    for (std::size_t i = 0; i < count; ++i) {
      RecordedCase c;
      RecordedLayers layers;
      next(i, c, layers);
      write_case(file.create_group(group_of(i)), head, c, layers);
    }
  });
}

Recording::Recording(const std::string& path) : path_(path) {
  const auto lock = h5::lock();
  const h5::File file = results::open_sealed(path);
  if (!file.has_attribute(".", "kind") || file.text_attribute(".", "kind") != kind)
    throw Error(Errc::result_file, "got another kind of file, wanted one that `kvlab record` wrote", path);
  if (const std::int64_t schema = file.integer_attribute(".", "recording_schema"); schema != recording_schema)
    throw Error(Errc::result_file,
                fmt::format("got a recording of schema {}, wanted {}: kvlab {} wrote it, and this is another version",
                            schema, recording_schema, file.text_attribute(".", "kvlab_version")),
                path);
  head_.info = results::read_info(file);
  head_.model = read_model(file, path);
  const std::size_t count = file.children("cases").size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::string name = group_of(i);
    const h5::Location at = file.group(name);
    cases_.push_back(read_case(at));
    want_extents(at, head_, cases_.back(), path + ": " + name);
  }
  if (cases_.empty()) throw Error(Errc::result_file, "got a recording without cases, wanted one at least", path);
}

std::shared_ptr<const RecordedLayers> Recording::layers(std::size_t number) const {
  const auto lock = h5::lock();
  if (const auto found = kept_.find(number); found != kept_.end()) return found->second;
  const h5::File file = h5::File::open(path_);  // its bytes were checked before
  const h5::Location at = file.group(group_of(number));
  auto read = std::make_shared<RecordedLayers>();
  std::int64_t bytes = 0;
  const auto count = [&](const auto& array) { bytes += static_cast<std::int64_t>(array.size() * sizeof array[0]); };
  const auto rows = [&](const char* name, std::vector<float>& values, std::vector<std::uint16_t>* kept) {
    if (head_.model->dtype == DType::bf16) {
      const std::vector<std::uint16_t> bits = at.read_u16(name, 4);
      values = values_of(bits);
      if (kept) count(*kept = by_head(bits, std::ssize(cases_[number].prompt), head_.model->config));
    } else {
      values = at.read_f32(name, 4);
    }
    count(values);
  };
  rows("prompt_queries", read->prompt_queries, nullptr);
  rows("keys", read->keys, &read->key_bits);
  rows("values", read->values, &read->value_bits);
  count(read->step_queries = at.read_f32("step_queries", 4));
  count(read->prompt_mass = at.read_f32("prompt_mass", 3));
  std::shared_ptr<const RecordedLayers> out = std::move(read);
  if (kept_bytes_ + bytes > most_kept) return out;
  kept_bytes_ += bytes;
  return kept_[number] = std::move(out);
}

std::vector<std::size_t> Recording::cases_of(const std::string& task, std::int64_t seed) const {
  std::vector<std::size_t> out;
  for (std::size_t i = 0; i < cases_.size(); ++i)
    if (cases_[i].task == task && cases_[i].seed == seed) out.push_back(i);
  return out;
}

}  // namespace kvlab
