// The one exception type of kvlab. Message style: "got X, wanted Y", then where (file:line:column, tensor name,
// plugin). Not fitting in memory is a value (see the store's and engine's results), never an Error.
#pragma once
#include <exception>
#include <string>
#include <utility>

namespace kvlab {

enum class Errc {
  config,       // YAML, parameters, command line
  model,        // weights, adapter, model config
  tokenizer,    // vocabulary files
  plugin,       // loading or using a plugin library
  data,         // data sets, prompts, references
  result_file,  // HDF5 results and profiles
  unsupported,  // a valid request that this build, backend or machine cannot serve
  io,           // the operating system refused
  network,      // something has to be fetched and cannot be
  device,       // GPU or driver
  internal,     // a kvlab bug: a broken invariant
};

class Error : public std::exception {
 public:
  // message: "got X, wanted Y"; where: "exp.yaml:3:7", "model.gguf: tensor blk.0.attn_q.weight", ... or empty.
  Error(Errc code, std::string message, std::string where = {})
      : code_(code),
        message_(std::move(message)),
        where_(std::move(where)),
        text_(where_.empty() ? message_ : where_ + ": " + message_) {}

  Errc code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }
  const std::string& where() const noexcept { return where_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  Errc code_;
  std::string message_, where_, text_;
};

}  // namespace kvlab
