// The header of a data file: settings that its converter knows (datasets/README.md).
#pragma once

#include <charconv>
#include <cstddef>
#include <string>
#include <vector>

#include "template.hpp"

namespace jsonl {

struct Header {
  std::string prompt, question_text, answer_opening, references, metric, truncate;
  int max_new_tokens = 0;
  bool chat = true;
  std::vector<std::string> stops;  // texts that end an answer
  bool there = false;              // false: the file has none, and nothing above counts
};

// A record whose one field is this object is a header.
inline constexpr const char* header_name = "kvlab_dataset";

// A record's texts that end an answer. Core reads this field of a question's record, and refuses what is no list.
inline constexpr const char* stop_field = "stop";

// Reads the keys of a header. Errors name the file and the key.
class HeaderReader {
 public:
  HeaderReader(const kvlab::Record& record, std::string where) : record_(record), where_(std::move(where)) {}

  std::string text(const std::string& key) const {
    const auto it = record_.find(std::string(header_name) + "." + key);
    if (it == record_.end() || it->second.size() != 1) fail(key, it == record_.end() ? "nothing" : "no text", "a text");
    return it->second.front();
  }
  int number(const std::string& key, int least) const {
    const std::string word = text(key);
    int out = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), out);
    if (error != std::errc() || end != word.data() + word.size() || out < least)
      fail(key, "'" + word + "'", "an integer of at least " + std::to_string(least));
    return out;
  }
  std::string one_of(const std::string& key, const std::string& first, const std::string& second) const {
    const std::string word = text(key);
    if (word != first && word != second) fail(key, "'" + word + "'", first + " or " + second);
    return word;
  }
  // Of a key that headers of earlier versions may lack.
  std::vector<std::string> texts(const std::string& key) const {
    const auto it = record_.find(std::string(header_name) + "." + key);
    return it == record_.end() ? std::vector<std::string>() : it->second;
  }
  [[noreturn]] void fail(const std::string& key, const std::string& got, const std::string& wanted) const {
    throw kvlab::Error(kvlab::Errc::data, "got " + got + " as '" + key + "' of the header, wanted " + wanted, where_);
  }

 private:
  const kvlab::Record& record_;
  std::string where_;
};

// Takes a header off the front of the records. A file that lost records, or got another file's, is refused.
inline Header take_header(std::vector<kvlab::Record>& records, const std::string& file) {
  Header out;
  const auto is_header = [](const kvlab::Record& r) { return r.find(header_name) != r.end(); };
  if (is_header(records.front())) {
    const HeaderReader reader(records.front(), file);
    if (const int schema = reader.number("schema", 1); schema != 1)
      reader.fail("schema", std::to_string(schema), "1: another version of kvlab's converters wrote the file");
    out.prompt = reader.text("prompt");
    if (out.prompt.empty()) reader.fail("prompt", "an empty text", "a template");
    out.question_text = reader.text("question_text");
    out.answer_opening = reader.text("answer_opening");
    out.references = reader.text("references");
    out.metric = reader.text("metric");
    out.truncate = reader.one_of("truncate", "none", "middle");
    out.max_new_tokens = reader.number("max_new_tokens", 1);
    out.chat = reader.one_of("chat", "true", "false") == "true";
    out.stops = reader.texts(stop_field);
    out.there = true;
    const auto count = static_cast<std::size_t>(reader.number("records", 1));
    records.erase(records.begin());
    if (count != records.size())
      throw kvlab::Error(
          kvlab::Errc::data,
          "got " + std::to_string(records.size()) + " records, wanted the header's " + std::to_string(count), file);
  }
  for (std::size_t i = 0; i < records.size(); ++i)
    if (is_header(records[i]))
      throw kvlab::Error(kvlab::Errc::data, "got a second header, wanted one, as the file's first record",
                         file + ": record " + std::to_string(i + 1));
  return out;
}

}  // namespace jsonl
