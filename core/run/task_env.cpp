#include "run/task_env.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/regular_file.hpp"
#include "base/sha256.hpp"
#include "base/utf8.hpp"
#include "model/bundled.hpp"
#include "run/stops.hpp"

namespace kvlab {
namespace {

constexpr std::string_view marker = "\x01USER\x01";  // stands for the user's message while the template is applied

std::string text_of(const nlohmann::json& v) { return v.is_string() ? v.get<std::string>() : v.dump(); }

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

// Refuses JSON that is nested so deeply that writing it would exhaust the stack.
nlohmann::json parse(std::string_view json, const std::string& where) {
  constexpr int deepest = 64;
  try {
    return nlohmann::json::parse(json, [&](int depth, auto, const auto&) {
      if (depth > deepest)
        throw Error(Errc::data, "got JSON nested deeper than " + std::to_string(deepest) + " levels", where);
      return true;
    });
  } catch (const nlohmann::json::parse_error& e) {
    throw Error(Errc::data,
                "got text that is no JSON, wanted one whole JSON value (byte " + std::to_string(e.byte) + ")", where);
  }
}

// Adds every value as text under its name. The parts of an object, and of a list that holds objects or lists, also have
// names: "answers.text", "answers.0".
void add_fields(const std::string& name, const nlohmann::json& value, Record& out) {
  auto& texts = out[name];
  if (!value.is_array()) {
    if (!value.is_null() && value != nlohmann::json::object()) texts.push_back(text_of(value));
  } else {
    for (const auto& v : value)
      if (!v.is_null()) texts.push_back(text_of(v));
  }
  const bool has_parts =
      value.is_object() ||
      (value.is_array() && std::any_of(value.begin(), value.end(), [](const auto& v) { return v.is_structured(); }));
  if (!has_parts) return;
  for (const auto& [key, part] : value.items()) add_fields(name + "." + key, part, out);
}

// As text a list of one would look like a text.
void check_stops(const std::string& name, const nlohmann::json& value, const std::string& where) {
  const auto fail = [&](const std::string& got) {
    throw Error(Errc::data, "got " + got + " as '" + name + "', wanted a list of texts that end an answer", where);
  };
  if (!value.is_array()) fail(std::string("a value of the type ") + value.type_name());
  for (const auto& text : value) {
    if (!text.is_string()) fail(std::string("a list with a value of the type ") + text.type_name());
    if (text.get_ref<const std::string&>().empty()) fail("a list with an empty text");
  }
}

Record record_of(const nlohmann::json& object, const std::string& where) {
  if (!object.is_object()) throw Error(Errc::data, "got JSON that is no object, wanted {field: value, ...}", where);
  Record r;
  for (const auto& [key, value] : object.items()) {
    if (key == stop_field) check_stops(key, value, where);
    const bool is_header = key == header_field && value.is_object();  // its list is that of all records
    if (is_header && value.contains(stop_field)) check_stops(key + "." + stop_field, value[stop_field], where);
    add_fields(key, value, r);
  }
  return r;
}

// Data that were edited after their conversion would be scored as the published set. Headers of earlier versions have
// no hash. A file that lacks records has a message of its own (plugins/jsonl).
void check_hash(const std::vector<Record>& records, std::string_view text, const std::string& where) {
  const auto in_header = [&](const char* field) {
    const auto found = records[0].find(std::string(header_field) + field);
    return found == records[0].end() || found->second.size() != 1 ? "" : found->second.front();
  };
  const std::string wanted = in_header(".records_sha256"), count = in_header(".records");
  if (wanted.empty() || (!count.empty() && count != std::to_string(records.size() - 1))) return;
  const std::string got = sha256_hex(text.substr(std::min(text.find('\n'), text.size() - 1) + 1));
  if (got != wanted)
    throw Error(Errc::data,
                "got records with SHA-256 " + got + ", wanted the header's records_sha256 " + wanted +
                    ": they were edited. Convert the set again, or take records_sha256 out of the header",
                where);
}

// Binary data would be encoded byte by byte and look like a prompt.
void check_text(std::string_view text, const std::string& where) {
  if (text.find_first_not_of(" \t\r\n\f\v") == std::string_view::npos)
    throw Error(Errc::data, "got a file without text, wanted a text file", where);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = text[at] == '\0' ? 0 : utf8_length(text, at);
    if (length == 0) {
      char byte[8];
      std::snprintf(byte, sizeof byte, "0x%02x", static_cast<unsigned>(static_cast<unsigned char>(text[at])));
      throw Error(
          Errc::data,
          std::string("got byte ") + byte + " at offset " + std::to_string(at) + ", wanted a text file in UTF-8",
          where);
    }
    at += length;
  }
}

std::string read_whole(const std::filesystem::path& path) {
  std::string text = read_file(path, "a text file");
  if (text.starts_with("\xef\xbb\xbf")) text.erase(0, 3);
  return text;
}

}  // namespace

ModelTaskEnv::ModelTaskEnv(std::shared_ptr<const Tokenizer> tokenizer, std::filesystem::path folder, std::uint64_t seed,
                           int questions, int turns)
    : tokenizer_(std::move(tokenizer)), folder_(std::move(folder)), seed_(seed), questions_(questions), turns_(turns) {
  if (tokenizer_->chat_template().kind == ChatTemplate::Kind::none) {
    open_ = text_open();
    return;
  }
  const std::string chat = tokenizer_->chat_prompt(marker);
  const std::size_t at = chat.find(marker);
  open_ = tokenizer_->encode(chat.substr(0, at), true, true);
  close_ = tokenizer_->encode(chat.substr(at + marker.size()), false, true);
  next_ = tokenizer_->encode(chat_turn(tokenizer_->chat_template()), false, true);
}

std::vector<int> ModelTaskEnv::encode(std::string_view text) const { return tokenizer_->encode(text, false, false); }

std::vector<int> ModelTaskEnv::encode_next(std::string_view text) const {
  if (text.empty()) return {};
  // Encodes a character in front of the text and takes its tokens off again. No pre-tokenizer joins it to the text.
  const std::string before = is_space(text[0]) ? "a" : "\n";
  const std::vector<int> head = encode(before), all = encode(before + std::string(text));
  if (all.size() < head.size() || !std::equal(head.begin(), head.end(), all.begin())) return encode(text);
  return {all.begin() + static_cast<std::ptrdiff_t>(head.size()), all.end()};
}

std::string ModelTaskEnv::decode(const std::vector<int>& tokens) const { return tokenizer_->decode(tokens); }

std::vector<int> ModelTaskEnv::text_open() const { return tokenizer_->adds_bos() ? bos() : std::vector<int>{}; }

std::vector<int> ModelTaskEnv::bos() const {
  return tokenizer_->bos_id() >= 0 ? std::vector<int>{tokenizer_->bos_id()} : std::vector<int>{};
}

std::string ModelTaskEnv::read_text(const std::string& path) const {
  if (path.empty()) throw Error(Errc::data, "got no path, wanted that of a text file");
  const auto full = resolve_data_path(path, folder_);
  std::string text = read_whole(full);
  check_text(text, full.string());
  return text;
}

std::vector<Record> ModelTaskEnv::records(const std::string& path) const {
  const std::filesystem::path full = resolve_data_path(path, folder_);
  if (std::error_code error; !std::filesystem::exists(full, error)) {
    const std::string folder = full.parent_path().lexically_normal().string();
    throw Error(
        Errc::io,
        "got no such file, wanted JSON lines, an object a record. `python3 datasets/convert.py list` says where "
        "public sets come from, and `python3 datasets/convert.py SET --from FILES --to " +
            (folder.empty() ? "." : folder) + "` makes such files of them",
        full.string());
  }
  const std::string where = full.string(), text = read_whole(where);
  std::vector<Record> out;
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '[') {
    const auto array = parse(text, where);
    for (std::size_t i = 0; i < array.size(); ++i)
      out.push_back(record_of(array[i], where + ": record " + std::to_string(i + 1)));
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
    if (!out.empty()) check_hash(out, std::string_view(text).substr(first), where);
  }
  if (out.empty()) throw Error(Errc::data, "got no records, wanted JSON lines or a JSON array", where);
  return out;
}

}  // namespace kvlab
