// What a result file says about its models: enough to tell later whether a model here is the same one.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "model/model.hpp"

namespace kvlab {

struct ModelRecord {
  std::string name;       // as the experiment spells it
  std::string content;    // Checkpoint::fingerprint
  std::string tokenizer;  // Tokenizer::id; "none" without one, as the next two
  std::string chat;       // kind and hash of the chat template: "chatml 0123456789abcdef"
  std::string stop_ids;   // tokens that end an answer: "[0, 2]"
};

ModelRecord record_of(const std::string& name, const std::string& content, const Tokenizer* tokenizer);

// As JSON, a list of objects with these members. A name that is there twice (two dtypes) is written once.
std::string models_text(const std::vector<std::shared_ptr<const Model>>& models);

// Nothing for an empty text, which earlier versions leave. Errc::result_file for a text that is not of models_text.
std::vector<ModelRecord> read_models(const std::string& text);

}  // namespace kvlab
