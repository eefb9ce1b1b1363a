#include "papers/file_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "base/text.hpp"

namespace kvlab::papers {
namespace {

using Kind = yaml::Node::Kind;

const std::vector<std::string> reads{"score",
                                     "pass",
                                     "kl",
                                     "top1",
                                     "mass",
                                     "compression",
                                     "device_bytes_peak",
                                     "device_bytes_decode",
                                     "host_bytes_peak",
                                     "fetched_bytes",
                                     "ttft_ms",
                                     "tpot_ms_mean",
                                     "tpot_ms_p50",
                                     "tpot_ms_p95",
                                     "tpot_ms_p99",
                                     "tokens_per_s",
                                     "overhead",
                                     "part_ms",
                                     "part_share",
                                     "prompt_tokens",
                                     "answer_tokens",
                                     "requests_at_once",
                                     "decode_tokens_per_s",
                                     "array_mean",
                                     "array_least",
                                     "array_most",
                                     "shared_heads"};
const std::vector<std::string> forms{"value", "percent", "ratio", "inverse", "saved", "retained"};
const std::vector<std::string> reading_keys{"policy", "task",    "model", "context", "budget", "run",  "read",
                                            "as",     "against", "over",  "pair",    "array",  "unit", "parts"};

}  // namespace

FileReader::Taken::Taken(FileReader& reader, const Node& node, const std::vector<std::string>& known,
                         const std::string& what)
    : node_(node) {
  if (!node.is(Kind::map)) reader.wrong(node, yaml::describe(node), "a map for " + what);
  for (const yaml::Entry& e : node.entries)
    if (std::find(known.begin(), known.end(), e.key.text) == known.end())
      reader.problems_.add(e.key.place, unknown_key(e.key.text, known));
}

void FileReader::wrong(const Node& at, const std::string& got, const std::string& wanted) {
  problems_.add(at.place, "got " + got + ", wanted " + wanted);
}

std::string FileReader::text(const Node* node, const char* key, const Node& around) {
  if (node && node->is(Kind::scalar) && !node->text.empty()) return node->text;
  wrong(node ? *node : around, node ? yaml::describe(*node) : fmt::format("no key '{}'", key), "a text");
  return "";
}

std::string FileReader::word(const Node& node, const std::vector<std::string>& words) {
  if (node.is(Kind::scalar) && std::find(words.begin(), words.end(), node.text) != words.end()) return node.text;
  wrong(node, yaml::describe(node),
        "one of: " + join(words) + (node.is(Kind::scalar) ? did_you_mean(node.text, words) : ""));
  return words.front();
}

std::optional<double> FileReader::number(const Node& node) {
  const ParamSpec spec = make_param("number", 0.0, -any, any, "");
  const auto value = read_value(node, spec, problems_);
  if (!value) return std::nullopt;
  return std::get<double>(*value);
}

std::vector<std::string> FileReader::texts(const Node* node) {
  std::vector<std::string> out;
  if (!node) return out;
  if (!node->is(Kind::list)) wrong(*node, yaml::describe(*node), "a list of texts");
  for (const Node& one : node->items) out.push_back(text(&one, "", *node));
  return out;
}

std::vector<std::pair<std::string, std::string>> FileReader::settings(const Node* node) {
  std::vector<std::pair<std::string, std::string>> out;
  if (!node) return out;
  if (!node->is(Kind::map)) wrong(*node, yaml::describe(*node), "a map of texts");
  for (const yaml::Entry& e : node->entries) out.emplace_back(e.key.text, text(&e.value, "", *node));
  return out;
}

// `tasks`, a list of tasks, or a list of such lists.
void FileReader::over(const Node& node, Reading& r) {
  r.over_tasks = true;
  r.groups.clear();
  if (!node.is(Kind::list)) {
    word(node, {"tasks"});
    return;
  }
  const bool nested = !node.items.empty() && node.items.front().is(Kind::list);
  if (!nested) r.groups.push_back(texts(&node));
  for (const Node& one : node.items)
    if (nested) r.groups.push_back(texts(&one));
  for (const auto& group : r.groups)
    if (group.empty()) wrong(node, "an empty list", "tasks");
}

void FileReader::add(const Node& map, Reading& r, const std::vector<std::string>& others) {
  std::vector<std::string> known = reading_keys;
  known.insert(known.end(), others.begin(), others.end());
  const Taken keys(*this, map, known, "what a value belongs to");
  const auto set = [&](const char* key, const std::function<void(const Node&)>& how) {
    if (const Node* node = keys[key]) how(*node);
  };
  const auto label = [&](const char* key, std::string& to) {
    set(key, [&](const Node& n) { to = text(&n, key, map); });
  };
  label("policy", r.policy), label("task", r.task), label("model", r.model), label("run", r.run);
  label("against", r.against), label("array", r.array), label("unit", r.unit);
  set("context", [&](const Node& n) { r.context = number(n); });
  set("budget", [&](const Node& n) { r.budget = number(n); });
  set("read", [&](const Node& n) { r.read = word(n, reads); });
  set("as", [&](const Node& n) { r.as = word(n, forms); });
  set("over", [&](const Node& n) { over(n, r); });
  set("parts", [&](const Node& n) { r.parts = texts(&n); });
  set("pair", [&](const Node& n) {
    r.pair = texts(&n);
    if (r.pair.size() != 2) wrong(n, fmt::format("{} names", r.pair.size()), "the stems of two experiments");
  });
}

void FileReader::check(const Reading& r, const Node& at) {
  if (r.read.starts_with("part_") && r.parts.empty()) wrong(at, r.read + " without 'parts'", "the parts of a step");
  if (r.read.starts_with("array_") && r.array.empty()) wrong(at, r.read + " without 'array'", "one of a profile");
  if (r.read == "shared_heads" && (r.pair.size() != 2 || r.array.empty()))
    wrong(at, "shared_heads without 'pair' and 'array'", "two profile experiments and their set of heads");
}

std::vector<std::filesystem::path> yaml_files(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing))
    if (entry.path().extension() == ".yaml") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace kvlab::papers
