#include "run/task_env.hpp"

#include <kvlab/error.hpp>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace kvlab {
namespace {

constexpr std::string_view marker = "\x01USER\x01";  // stands for the user's message while the template is applied

std::string text_of(const nlohmann::json& v) { return v.is_string() ? v.get<std::string>() : v.dump(); }

Record record_of(const nlohmann::json& object, const std::string& where) {
  if (!object.is_object()) throw Error(Errc::data, "got JSON that is no object, wanted {field: value, ...}", where);
  Record r;
  for (const auto& [key, value] : object.items()) {
    auto& texts = r[key];
    if (value.is_array())
      for (const auto& v : value) texts.push_back(text_of(v));
    else if (!value.is_null())
      texts.push_back(text_of(value));
  }
  return r;
}

}  // namespace

ModelTaskEnv::ModelTaskEnv(std::shared_ptr<const Tokenizer> tokenizer, std::filesystem::path folder, std::uint64_t seed,
                           int questions)
    : tokenizer_(std::move(tokenizer)), folder_(std::move(folder)), seed_(seed), questions_(questions) {
  if (tokenizer_->chat_template().kind == ChatTemplate::Kind::none) {
    if (tokenizer_->adds_bos()) open_ = {tokenizer_->bos_id()};
    return;
  }
  const std::string chat = tokenizer_->chat_prompt(marker);
  const std::size_t at = chat.find(marker);
  open_ = tokenizer_->encode(chat.substr(0, at), true, true);
  close_ = tokenizer_->encode(chat.substr(at + marker.size()), false, true);
}

std::vector<int> ModelTaskEnv::encode(std::string_view text) const { return tokenizer_->encode(text, false, false); }

std::string ModelTaskEnv::decode(const std::vector<int>& tokens) const { return tokenizer_->decode(tokens); }

std::string ModelTaskEnv::read_text(const std::string& path) const {
  const auto full = folder_ / path;
  std::ifstream in(full, std::ios::binary);
  std::ostringstream text;
  if (!in || !(text << in.rdbuf())) throw Error(Errc::data, "cannot read it, wanted a text file", full.string());
  return text.str();
}

std::vector<Record> ModelTaskEnv::records(const std::string& path) const {
  const std::string text = read_text(path), where = (folder_ / path).string();
  std::vector<Record> out;
  const auto parse = [](std::string_view json, const std::string& at) {
    auto value = nlohmann::json::parse(json, nullptr, false);
    if (value.is_discarded()) throw Error(Errc::data, "got text that is no JSON", at);
    return value;
  };
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '[') {
    const auto array = parse(text, where);
    for (std::size_t i = 0; i < array.size(); ++i)
      out.push_back(record_of(array[i], where + ": record " + std::to_string(i)));
  } else {
    std::size_t line = 1;
    for (std::size_t at = 0; at < text.size(); ++line) {
      std::size_t end = text.find('\n', at);
      if (end == std::string::npos) end = text.size();
      const std::string_view row = std::string_view(text).substr(at, end - at);
      at = end + 1;
      if (row.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      const std::string here = where + ":" + std::to_string(line);
      out.push_back(record_of(parse(row, here), here));
    }
  }
  if (out.empty()) throw Error(Errc::data, "got no records, wanted JSON lines or a JSON array", where);
  return out;
}

}  // namespace kvlab
