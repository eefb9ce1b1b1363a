#include "model/hf_checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/content_hash.hpp"
#include "base/fingerprint.hpp"
#include "model/checkpoint_checks.hpp"
#include "model/json.hpp"
#include "model/safetensors.hpp"
#include "model/tokenizer_files.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

// The safetensors files of the folder: those its index names, or model.safetensors.
std::vector<fs::path> weight_files(const fs::path& folder) {
  const fs::path index = folder / "model.safetensors.index.json";
  if (!fs::exists(index)) {
    if (!fs::exists(folder / "model.safetensors"))
      throw Error(Errc::model, "got a folder without model.safetensors or its index, wanted one of them",
                  folder.string());
    return {folder / "model.safetensors"};
  }
  const MappedFile file(index);
  const Json document = parse_json(file.text(), index.string(), Errc::model);
  const JsonReader map = JsonReader(document, index.string(), Errc::model).object("weight_map");
  std::set<std::string> names;
  for (const auto& [tensor, name] : document["weight_map"].items()) {
    if (!name.is_string()) map.refuse(tensor.c_str(), name.type_name(), "a file name");
    const auto text = name.get<std::string>();
    if (text.empty() || text == ".." || text.find('/') != std::string::npos)
      map.refuse(tensor.c_str(), "'" + text + "'", "a file of this folder");
    names.insert(text);
  }
  std::vector<fs::path> out;
  for (const std::string& name : names) out.push_back(folder / name);
  return out;
}

// generation_config.json, if it is there, may list ends of a chat model's turns that config.json lacks.
void read_generation_config(const fs::path& path, ModelConfig& config) {
  if (!fs::exists(path)) return;
  const MappedFile file(path);
  const Json document = parse_json(file.text(), path.string(), Errc::model);
  const JsonReader json(document, path.string(), Errc::model);
  const Json* ids = json.find("eos_token_id");
  if (ids == nullptr) return;
  for (const Json& id : ids->is_array() ? *ids : Json::array({*ids})) {
    if (!id.is_number_integer() || id.get<std::int64_t>() < 0 || id.get<std::int64_t>() >= config.vocab)
      json.refuse("eos_token_id", id.dump(), "token ids");
    if (std::find(config.eos_ids.begin(), config.eos_ids.end(), id.get<int>()) == config.eos_ids.end())
      config.eos_ids.push_back(id.get<int>());
  }
}

std::string chat_template(const fs::path& folder) {
  if (const fs::path jinja = folder / "chat_template.jinja"; fs::exists(jinja))
    return std::string(MappedFile(jinja).text());
  const fs::path path = folder / "tokenizer_config.json";
  if (!fs::exists(path)) return {};
  const MappedFile file(path);
  const Json document = parse_json(file.text(), path.string(), Errc::tokenizer);
  const JsonReader json(document, path.string(), Errc::tokenizer);
  const Json* value = json.find("chat_template");
  if (value == nullptr) return {};
  if (value->is_string()) return value->get<std::string>();
  if (value->is_array())  // several templates, by name
    for (const Json& one : *value) {
      const JsonReader named(one, json.where("chat_template"), Errc::tokenizer);
      if (named.text("name", "") == "default") return named.text("template");
    }
  return {};
}

std::shared_ptr<const Tokenizer> read_tokenizer(const fs::path& folder, const ModelConfig& config) {
  const TokenizerHints hints{config.bos_id, config.eos_ids, chat_template(folder)};
  if (fs::exists(folder / "tokenizer.json")) return tokenizer_from_json(folder / "tokenizer.json", hints);
  if (fs::exists(folder / "tokenizer.model")) return tokenizer_from_sentencepiece(folder / "tokenizer.model", hints);
  return nullptr;
}

// The hash of every file that is read out of the folder.
std::string fingerprint_of(const fs::path& folder) {
  std::vector<fs::path> files = weight_files(folder);
  for (const char* name : {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
                           "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"})
    if (fs::exists(folder / name)) files.push_back(folder / name);
  Fingerprint all;
  for (const fs::path& file : files) all.add(file.filename().string()).add(content_hashes().of(file));
  return all.hex();
}

class HfCheckpoint final : public Checkpoint {
 public:
  explicit HfCheckpoint(const fs::path& folder) : where_(folder.string()) {
    const fs::path config = folder / "config.json";
    config_ = read_hf_config(MappedFile(config).text(), config.string());
    read_generation_config(folder / "generation_config.json", config_);
    validate(config_, config.string());
    const StoredTensor* shared = nullptr;
    for (const fs::path& path : weight_files(folder)) {
      files_.push_back(std::make_unique<SafetensorsFile>(path));
      const SafetensorsFile& file = *files_.back();
      for (const auto& [name, tensor] : file.tensors()) {
        if (name == "lm_head.weight" && config_.tied_embeddings) {  // the same under two names; files keep either
          shared = &tensor;
          continue;
        }
        if (!tensors_.emplace(name, &tensor).second)
          throw Error(Errc::model, "got the tensor in two files, wanted it once", file.where() + ": " + name);
      }
    }
    if (shared != nullptr) tensors_.emplace("model.embed_tokens.weight", shared);
    check_tensors(*this, where_);
    tokenizer_ = read_tokenizer(folder, config_);
    check_tokenizer(tokenizer_.get(), config_, where_);
    fingerprint_ = fingerprint_of(folder);
  }

  bool has(std::string_view name) const override { return tensors_.find(name) != tensors_.end(); }
  std::vector<std::int64_t> shape(std::string_view name) const override { return find(name).shape; }
  std::string stored_type(std::string_view name) const override { return name_of(find(name).type); }

  std::vector<std::string> names() const override {
    std::vector<std::string> out;
    for (const auto& [name, tensor] : tensors_) out.push_back(name);
    return out;
  }

  void read_rows(std::string_view name, std::int64_t row_begin, std::int64_t row_count, float* out) const override {
    const StoredTensor& tensor = find(name);
    check_rows(name, tensor.rows(), row_begin, row_count, where_);
    const std::int64_t row_bytes = tensor.columns() * block_of(tensor.type).bytes;
    dequantize(tensor.type, tensor.data + row_begin * row_bytes, row_count * tensor.columns(), out);
  }

 private:
  const StoredTensor& find(std::string_view name) const {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) unknown_tensor(name, where_);
    return *it->second;
  }

  std::string where_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const StoredTensor*, std::less<>> tensors_;
};

}  // namespace

std::unique_ptr<Checkpoint> open_hf_folder(const fs::path& folder) { return std::make_unique<HfCheckpoint>(folder); }

}  // namespace kvlab
