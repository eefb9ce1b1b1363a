#include "run/model_record.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <kvlab/error.hpp>
#include <nlohmann/json.hpp>

namespace kvlab {
namespace {

constexpr std::pair<const char*, std::string ModelRecord::*> members[] = {
    {"name", &ModelRecord::name}, {"content", &ModelRecord::content},   {"tokenizer", &ModelRecord::tokenizer},
    {"chat", &ModelRecord::chat}, {"stop_ids", &ModelRecord::stop_ids},
};

}  // namespace

ModelRecord record_of(const std::string& name, const std::string& content, const Tokenizer* tokenizer) {
  ModelRecord out{name, content, "none", "none", "none"};
  if (!tokenizer) return out;
  const ChatTemplate& chat = tokenizer->chat_template();
  out.tokenizer = tokenizer->id();
  out.chat = chat.hash.empty() ? name_of(chat.kind) : fmt::format("{} {}", name_of(chat.kind), chat.hash);
  out.stop_ids = fmt::format("[{}]", fmt::join(tokenizer->eos_ids(), ", "));
  return out;
}

std::string models_text(const std::vector<std::shared_ptr<const Model>>& models) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const auto& model : models) {
    const ModelRecord record = record_of(model->name, model->fingerprint, model->tokenizer.get());
    nlohmann::ordered_json one;
    for (const auto& [name, member] : members) one[name] = record.*member;
    if (std::find(list.begin(), list.end(), one) == list.end()) list.push_back(one);
  }
  return list.dump();
}

std::vector<ModelRecord> read_models(const std::string& text) {
  std::vector<ModelRecord> out;
  if (text.empty()) return out;
  try {
    for (const auto& one : nlohmann::json::parse(text)) {
      ModelRecord& record = out.emplace_back();
      for (const auto& [name, member] : members) record.*member = one.at(name).get<std::string>();
    }
  } catch (const nlohmann::json::exception& e) {
    throw Error(Errc::result_file, fmt::format("got models that cannot be read ({}), wanted a list of them", e.what()));
  }
  return out;
}

}  // namespace kvlab
