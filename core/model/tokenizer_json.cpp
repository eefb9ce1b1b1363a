#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <unordered_map>

#include "model/bpe.hpp"
#include "model/byte_alphabet.hpp"
#include "model/json.hpp"
#include "model/mapped_file.hpp"
#include "model/tokenizer_files.hpp"

namespace kvlab {
namespace {

JsonReader reader(const Json& value, const std::string& where) { return {value, where, Errc::tokenizer}; }

// Settings of the normalizer and the pre-tokenizer, gathered while they are read.
struct Recipe {
  BpeParts* parts;
  bool byte_level = false;
  bool marks = false;  // spaces become U+2581
};

void read_normalizer(const JsonReader& json, Recipe& recipe) {
  const std::string type = json.text("type");
  const auto is_mark = [](const std::string& text) { return text == "\u2581"; };
  if (type == "Sequence") {
    for (const Json& part : json.array("normalizers")) read_normalizer(reader(part, json.where("normalizers")), recipe);
  } else if (type == "Prepend" && is_mark(json.text("prepend"))) {
    recipe.parts->space = BpeParts::Space::each;
  } else if (type == "Replace" && is_mark(json.text("content")) && json.object("pattern").text("String", "") == " ") {
    recipe.marks = true;
  } else if (type != "NFC") {  // NFC is skipped: GGUF's readers, too, take texts as composed
    json.refuse("type", "'" + type + "'", "NFC, or the Prepend and Replace of SentencePiece models");
  }
}

void read_split(const JsonReader& json, Recipe& recipe) {
  const JsonReader pattern = json.object("pattern");
  const std::string behavior = json.text("behavior");
  const bool invert = json.boolean("invert", false);
  using Keep = PreTokenizer::Keep;
  if (behavior != "Isolated" && behavior != "Removed")
    json.refuse("behavior", "'" + behavior + "'", "Isolated or Removed");
  const Keep keep = behavior == "Isolated" ? Keep::all : invert ? Keep::matches : Keep::between;
  if (pattern.has("Regex")) return recipe.parts->splitter.add(pattern.text("Regex"), keep);
  std::string literal;  // the string to cut at, escaped for the regular expression
  for (const char c : pattern.text("String")) {
    if (static_cast<unsigned char>(c) < 0x80 && std::isalnum(static_cast<unsigned char>(c)) == 0)
      literal.push_back('\\');
    literal.push_back(c);
  }
  recipe.parts->splitter.add(literal, keep);
}

void read_metaspace(const JsonReader& json, Recipe& recipe) {
  recipe.marks = true;
  if (json.text("replacement", "\u2581") != "\u2581") json.refuse("replacement", "another character", "U+2581");
  const std::string scheme = json.text("prepend_scheme", json.boolean("add_prefix_space", true) ? "always" : "never");
  using Space = BpeParts::Space;
  if (scheme == "always")
    recipe.parts->space = Space::each_unless_there;
  else if (scheme == "first")
    recipe.parts->space = Space::first;
  else if (scheme != "never")
    json.refuse("prepend_scheme", "'" + scheme + "'", "always, first or never");
  if (json.boolean("split", true)) recipe.parts->splitter.add(" [^ ]*");  // every piece begins at a space
}

void read_pre_tokenizer(const JsonReader& json, Recipe& recipe) {
  const std::string type = json.text("type");
  if (type == "Sequence") {
    for (const Json& part : json.array("pretokenizers"))
      read_pre_tokenizer(reader(part, json.where("pretokenizers")), recipe);
  } else if (type == "ByteLevel") {
    recipe.byte_level = true;
    if (json.boolean("add_prefix_space", true)) json.refuse("add_prefix_space", "true", "false");
    if (json.boolean("use_regex", true)) recipe.parts->splitter.add(gpt2_pattern);
  } else if (type == "Digits") {
    recipe.parts->splitter.add(json.boolean("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)");
  } else if (type == "Split") {
    read_split(json, recipe);
  } else if (type == "Metaspace") {
    read_metaspace(json, recipe);
  } else {
    json.refuse("type", "'" + type + "'", "ByteLevel, Digits, Split, Metaspace or a Sequence of them");
  }
}

using Ids = std::unordered_map<std::string, int>;

// Makes room for all ids and enters the vocabulary's tokens.
Ids read_vocab(const JsonReader& model, const Json& added, const Recipe& recipe) {
  const Json* vocab = model.find("vocab");
  if (vocab == nullptr || !vocab->is_object()) model.refuse("vocab", "no object", "tokens and their ids");
  BpeParts& parts = *recipe.parts;
  // Ids may have holes, but a file cannot make us allocate much more than it holds.
  const auto limit = static_cast<std::int64_t>(vocab->size() + added.size() + 65536);
  const auto enter = [&](std::int64_t id, std::string text) {
    if (id < 0 || id >= limit)
      model.refuse("vocab", fmt::format("'{}' with id {}", text, id), fmt::format("an id below {}", limit));
    if (parts.tokens.size() <= static_cast<std::size_t>(id)) parts.tokens.resize(static_cast<std::size_t>(id) + 1);
    parts.tokens[static_cast<std::size_t>(id)] = std::move(text);
  };
  Ids ids;
  ids.reserve(vocab->size());
  for (const auto& [text, value] : vocab->items()) {
    if (!value.is_number_integer()) model.refuse("vocab", fmt::format("'{}': {}", text, value.type_name()), "an id");
    const auto id = value.get<std::int64_t>();
    if (recipe.byte_level) {
      const auto bytes = spelled_bytes(text);
      enter(id, bytes ? *bytes : text);
      if (bytes && bytes->size() == 1) parts.byte_ids[static_cast<unsigned char>((*bytes)[0])] = static_cast<int>(id);
    } else {
      const int byte = model.boolean("byte_fallback", false) ? byte_token_value(text) : -1;
      enter(id, byte >= 0 ? std::string(1, static_cast<char>(byte)) : spaces_for_marks(text));
      if (byte >= 0) parts.byte_ids[static_cast<std::size_t>(byte)] = static_cast<int>(id);
    }
    ids.emplace(text, static_cast<int>(id));
  }
  for (const Json& value : added) {
    const JsonReader token = reader(value, model.where("added_tokens"));
    std::string content = token.text("content");
    if (token.boolean("single_word", false)) token.refuse("single_word", "true for '" + content + "'", "false");
    const std::int64_t id = token.integer("id");
    enter(id, content);
    ids.emplace(content, static_cast<int>(id));
    parts.added.push_back({static_cast<int>(id), std::move(content), token.boolean("special", false),
                           token.boolean("lstrip", false), token.boolean("rstrip", false)});
  }
  return ids;
}

void read_merges(const JsonReader& model, const Ids& ids, BpeParts& parts) {
  for (const Json& merge : model.array("merges")) {
    std::string left, right;
    if (merge.is_string()) {  // "left right"
      const auto text = merge.get<std::string>();
      const auto space = text.find(' ', 1);
      left = text.substr(0, space);
      if (space != std::string::npos) right = text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    }
    const auto a = ids.find(left), b = ids.find(right), both = ids.find(left + right);
    if (a == ids.end() || b == ids.end() || both == ids.end())
      model.refuse("merges", fmt::format("'{}' + '{}'", left, right),
                   "two tokens of the vocabulary whose union is one");
    parts.merges.push_back({a->second, b->second, both->second});
  }
}

// These files say that a text starts with BOS by a template that begins with a token.
void read_post_processor(const JsonReader& json, const Ids& ids, BpeParts& parts) {
  const std::string type = json.text("type");
  if (type == "Sequence") {
    for (const Json& part : json.array("processors"))
      read_post_processor(reader(part, json.where("processors")), ids, parts);
  } else if (type == "TemplateProcessing") {
    const Json& single = json.array("single");
    if (single.empty() || !single[0].is_object() || !single[0].contains("SpecialToken")) return;
    const std::string token = reader(single[0], json.where("single")).object("SpecialToken").text("id");
    const auto id = ids.find(token);
    if (id == ids.end()) json.refuse("single", "'" + token + "'", "a token of the vocabulary");
    parts.bos_id = id->second;
    parts.add_bos = true;
  }
}

std::unique_ptr<Tokenizer> read_tokenizer(std::string_view text, const std::string& where,
                                          const TokenizerHints& hints) {
  const Json document = parse_json(text, where, Errc::tokenizer);
  const JsonReader json = reader(document, where), model = json.object("model");
  if (const std::string type = model.text("type", "BPE"); type != "BPE") model.refuse("type", "'" + type + "'", "BPE");
  if (model.number("dropout", 0) != 0) model.refuse("dropout", "a number", "null");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!model.text(key, "").empty()) model.refuse(key, "a text", "none");

  BpeParts parts;
  parts.kind = "bpe-json";
  parts.byte_ids.fill(-1);
  Recipe recipe{&parts};
  if (json.has("normalizer")) read_normalizer(json.object("normalizer"), recipe);
  if (json.has("pre_tokenizer")) read_pre_tokenizer(json.object("pre_tokenizer"), recipe);
  if (recipe.byte_level == recipe.marks)
    json.refuse("pre_tokenizer", recipe.marks ? "bytes and U+2581 together" : "neither bytes nor U+2581 for spaces",
                "one of the two");
  parts.characters = recipe.marks;
  parts.whole_pieces_first = model.boolean("ignore_merges", false);
  parts.fuse_unknown = model.boolean("fuse_unk", false);
  const Json none = Json::array();
  const Ids ids = read_vocab(model, json.has("added_tokens") ? json.array("added_tokens") : none, recipe);
  read_merges(model, ids, parts);
  if (model.has("unk_token")) {
    const auto unknown = ids.find(model.text("unk_token"));
    if (unknown == ids.end())
      model.refuse("unk_token", "'" + model.text("unk_token") + "'", "a token of the vocabulary");
    parts.unknown = unknown->second;
  }
  parts.bos_id = hints.bos_id;
  parts.eos_ids = hints.eos_ids;
  if (json.has("post_processor")) read_post_processor(json.object("post_processor"), ids, parts);
  parts.chat = recognise_chat_template(hints.chat_template);
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

}  // namespace

std::unique_ptr<Tokenizer> tokenizer_from_json(const std::filesystem::path& path, const TokenizerHints& hints) {
  const MappedFile file(path);
  try {
    return read_tokenizer(file.text(), path.string(), hints);
  } catch (const Error& e) {
    if (!e.where().empty()) throw;
    throw Error(e.code(), e.message(), path.string());
  } catch (const Json::exception& e) {
    throw Error(Errc::tokenizer, fmt::format("got '{}', wanted a tokenizer", e.what()), path.string());
  }
}

}  // namespace kvlab
