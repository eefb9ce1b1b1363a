#include "model/adapter.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <kvlab/error.hpp>
#include <map>
#include <set>

#include "base/content_hash.hpp"
#include "base/fingerprint.hpp"
#include "model/checkpoint_checks.hpp"
#include "model/json.hpp"
#include "model/safetensors.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

struct Config {
  int rank = 0;
  double alpha = 0;
  bool rank_stabilized = false;
  std::vector<std::string> targets;  // module names; empty: the file's tensors say which (a pattern, or all layers)

  double factor() const { return alpha / (rank_stabilized ? std::sqrt(rank) : rank); }
};

bool empty(const Json* value) {
  return value == nullptr || ((value->is_array() || value->is_object()) && value->empty());
}

Config read_config(const Json& document, const std::string& where) {
  const JsonReader json(document, where, Errc::model);
  const auto unsupported = [&](const char* key, const std::string& got, const std::string& wanted) {
    throw Error(Errc::unsupported, "got " + got + ", wanted " + wanted, json.where(key));
  };
  if (const std::string type = json.text("peft_type"); type != "LORA")
    unsupported("peft_type", "'" + type + "'", "LORA");
  if (const std::string bias = json.text("bias", "none"); bias != "none") unsupported("bias", "'" + bias + "'", "none");
  for (const char* key : {"use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"})
    if (json.boolean(key, false)) unsupported(key, "true", "false");
  for (const char* key : {"modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
                          "exclude_modules", "target_parameters", "trainable_token_indices", "layer_replication"})
    if (!empty(json.find(key))) unsupported(key, json.find(key)->dump(), "nothing: one rank for whole layers");

  Config c;
  c.rank = json.size("r");
  if (c.rank < 1) json.refuse("r", std::to_string(c.rank), "a rank of 1 or more");
  c.alpha = json.number("lora_alpha");
  c.rank_stabilized = json.boolean("use_rslora", false);
  if (const Json* targets = json.find("target_modules"); targets != nullptr && targets->is_array()) {
    for (const Json& one : *targets) {
      if (!one.is_string()) json.refuse("target_modules", one.type_name(), "names of modules");
      c.targets.push_back(one.get<std::string>());
    }
  } else if (targets == nullptr || !targets->is_string()) {
    json.refuse("target_modules", targets == nullptr ? "no such key" : targets->type_name(), "names of modules");
  }
  return c;
}

bool ends_with_module(const std::string& weight, const std::string& module) {
  const std::string end = "." + module + ".weight";
  return weight.ends_with(end) || weight == module + ".weight";
}

// lora_A [rank, in] and lora_B [out, rank] as stored, in f32.
struct Pair {
  std::vector<float> a, b;
};

class AdaptedCheckpoint final : public Checkpoint {
 public:
  AdaptedCheckpoint(std::unique_ptr<Checkpoint> base, const fs::path& folder) : base_(std::move(base)) {
    config_ = base_->config();
    tokenizer_ = base_->tokenizer();
    const MappedFile config_file(folder / "adapter_config.json");
    const std::string config_where = (folder / "adapter_config.json").string();
    const Json document = parse_json(config_file.text(), config_where, Errc::model);
    const Config c = read_config(document, config_where);
    rank_ = c.rank;
    factor_ = static_cast<float>(c.factor());

    const fs::path path = folder / "adapter_model.safetensors";
    const SafetensorsFile file(path);
    std::set<std::string> used;
    for (const std::string& name : base_->names()) {
      if (!name.ends_with("_proj.weight")) continue;
      const bool listed = std::any_of(c.targets.begin(), c.targets.end(),
                                      [&](const std::string& m) { return ends_with_module(name, m); });
      const std::string stem = "base_model.model." + name.substr(0, name.size() - std::string(".weight").size());
      const std::string a = stem + ".lora_A.weight", b = stem + ".lora_B.weight";
      if (!listed && !file.tensors().contains(a) && !file.tensors().contains(b)) continue;
      if (!c.targets.empty() && !listed)
        throw Error(Errc::model, fmt::format("got a matrix of a module that is none of {}", fmt::join(c.targets, ", ")),
                    file.where() + ": " + (file.tensors().contains(a) ? a : b));
      const std::vector<std::int64_t> shape = base_->shape(name);
      pairs_[name] = {read(file, a, {rank_, shape.at(1)}), read(file, b, {shape[0], rank_})};
      used.insert({a, b});
    }
    for (const auto& [name, tensor] : file.tensors())
      if (!used.contains(name))
        throw Error(Errc::model, "got a tensor that the model has no place for, wanted lora_A and lora_B of its layers",
                    file.where() + ": " + name);
    for (const std::string& module : c.targets)
      if (std::none_of(pairs_.begin(), pairs_.end(),
                       [&](const auto& pair) { return ends_with_module(pair.first, module); }))
        throw Error(Errc::model,
                    fmt::format("got target module '{}', wanted a projection of the model's layers", module),
                    config_where + ": target_modules");
    if (pairs_.empty())
      throw Error(Errc::model, "got no lora_A and lora_B of the model's layers, wanted some", file.where());

    fingerprint_ = Fingerprint().add(base_->fingerprint()).add(config_file.text()).add(content_hashes().of(path)).hex();
  }

  bool has(std::string_view name) const override { return base_->has(name); }
  std::vector<std::int64_t> shape(std::string_view name) const override { return base_->shape(name); }
  std::vector<std::string> names() const override { return base_->names(); }
  std::string stored_type(std::string_view name) const override { return base_->stored_type(name); }

  void read_rows(std::string_view name, std::int64_t row_begin, std::int64_t row_count, float* out) const override {
    base_->read_rows(name, row_begin, row_count, out);
    const auto it = pairs_.find(name);
    if (it == pairs_.end()) return;
    const Pair& p = it->second;
    const std::size_t rank = static_cast<std::size_t>(rank_), columns = p.a.size() / rank;
    for (std::int64_t r = 0; r < row_count; ++r) {
      float* row = out + static_cast<std::size_t>(r) * columns;
      const float* b = p.b.data() + static_cast<std::size_t>(row_begin + r) * rank;
      for (std::size_t k = 0; k < rank; ++k) {
        const float weight = factor_ * b[k];
        const float* a = p.a.data() + k * columns;
        for (std::size_t i = 0; i < columns; ++i) row[i] += weight * a[i];
      }
    }
  }

 private:
  static std::vector<float> read(const SafetensorsFile& file, const std::string& name,
                                 const std::vector<std::int64_t>& shape) {
    const auto it = file.tensors().find(name);
    if (it == file.tensors().end())
      throw Error(Errc::model, "got no such tensor, wanted it", file.where() + ": " + name);
    const StoredTensor& tensor = it->second;
    if (tensor.shape != shape)
      throw Error(Errc::model,
                  fmt::format("got shape [{}], wanted [{}]", fmt::join(tensor.shape, ", "), fmt::join(shape, ", ")),
                  file.where() + ": " + name);
    std::vector<float> out(static_cast<std::size_t>(shape[0] * shape[1]));
    dequantize(tensor.type, tensor.data, shape[0] * shape[1], out.data());
    check_weights(out.data(), shape[0], shape[1], 0, DType::f32, file.where() + ": " + name);
    return out;
  }

  std::unique_ptr<Checkpoint> base_;
  std::map<std::string, Pair, std::less<>> pairs_;  // by the weight's name
  int rank_ = 0;
  float factor_ = 0;
};

}  // namespace

std::unique_ptr<Checkpoint> merge_adapter(std::unique_ptr<Checkpoint> base, const fs::path& folder) {
  if (!fs::is_directory(folder))
    throw Error(Errc::model, "got no such folder, wanted adapter_config.json and adapter_model.safetensors in it",
                folder.string());
  return std::make_unique<AdaptedCheckpoint>(std::move(base), folder);
}

}  // namespace kvlab
