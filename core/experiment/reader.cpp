#include "experiment/reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "base/text.hpp"
#include "experiment/entry_keys.hpp"
#include "plugin/parameters.hpp"

namespace kvlab {
namespace {

using yaml::Node;

template <class T>
std::optional<T> number(std::string_view text) {
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The value of a plain scalar by YAML 1.2's core rules, decimal only.
ParamValue natural(const Node& node) {
  const std::string& t = node.text;
  if (node.quoted) return t;
  if (t == "true" || t == "True" || t == "TRUE") return true;
  if (t == "false" || t == "False" || t == "FALSE") return false;
  if (const auto i = number<std::int64_t>(t)) return *i;
  const bool numeric = !t.empty() && t.find_first_not_of("0123456789+-.eE") == std::string::npos;
  if (const auto d = numeric ? number<double>(t) : std::nullopt; d && std::isfinite(*d)) return *d;
  return t;
}

std::string wanted(const ParamSpec& spec) {
  const std::string range = range_text(spec);
  return std::string("one ") + name_of(spec.kind) + (range.empty() ? "" : " (" + range + ")");
}

// Lists in `node`, depth first; a list's own items are not searched.
void collect_axes(Node& node, std::vector<Node*>& axes) {
  if (node.is(Node::Kind::list)) return axes.push_back(&node);
  for (yaml::Entry& e : node.entries) collect_axes(e.value, axes);
}

bool holds_list(const Node& node) {
  if (node.is(Node::Kind::list)) return true;
  return std::any_of(node.entries.begin(), node.entries.end(), [](const auto& e) { return holds_list(e.value); });
}

}  // namespace

void Problems::add(yaml::Place place, const std::string& message, Errc code) {
  Error error(code, message, document_.where(place));
  if (seen_.insert(error.what()).second) errors_.push_back(std::move(error));
}

void Problems::add_unsupported(yaml::Place place, const std::string& what) {
  add(place, "got " + what + ", which is not in this version of kvlab", Errc::unsupported);
}

void Problems::raise() const {
  if (!errors_.empty()) throw ExperimentError(errors_);
}

ParamSpec make_choice(std::string name, std::vector<std::string> words, std::string help) {
  ParamSpec spec = make_param(std::move(name), words.front(), std::move(help));
  spec.kind = ParamKind::choice;
  spec.choices = std::move(words);
  return spec;
}

std::optional<ParamValue> read_value(const Node& node, const ParamSpec& spec, Problems& problems) {
  if (!node.is(Node::Kind::scalar)) {
    problems.add(node.place, "got " + yaml::describe(node) + " for '" + spec.name + "', wanted " + wanted(spec));
    return std::nullopt;
  }
  const bool as_word = spec.kind == ParamKind::text || spec.kind == ParamKind::choice;
  ParamValue value = as_word ? ParamValue(node.text) : natural(node);
  if (auto wrong = check(spec, value)) {
    const bool quotes = node.quoted && !as_word;
    // The message has the file's spelling: 5e2 is a number and no integer.
    if (const auto rest = wrong->find(", wanted "); !std::holds_alternative<std::string>(value))
      wrong = "got " + node.text + wrong->substr(rest);
    problems.add(node.place, *wrong + " for '" + spec.name + "'" + (quotes ? " (quotes make it text)" : ""));
    return std::nullopt;
  }
  if (const auto* i = std::get_if<std::int64_t>(&value); i && spec.kind == ParamKind::real)
    value = static_cast<double>(*i);
  return value;
}

std::optional<std::int64_t> read_bytes(const Node& node, Problems& problems) {
  static constexpr std::pair<const char*, double> units[] = {
      {"", 1},      {"B", 1},        {"KB", 1e3},        {"MB", 1e6},           {"GB", 1e9},
      {"TB", 1e12}, {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}, {"TiB", 1099511627776.0}};
  if (node.is(Node::Kind::scalar)) {
    const std::size_t digits = std::min(node.text.find_first_not_of("0123456789.eE+"), node.text.size());
    std::string_view unit = std::string_view(node.text).substr(digits);
    while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
    const auto amount = number<double>(std::string_view(node.text).substr(0, digits));
    for (const auto& [word, factor] : units)
      if (amount && unit == word && *amount * factor >= 1 && *amount * factor < 9e18)
        return static_cast<std::int64_t>(std::llround(*amount * factor));
  }
  problems.add(node.place, "got " + yaml::describe(node) +
                               ", wanted bytes with a unit of B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, e.g. 512MiB");
  return std::nullopt;
}

std::string unknown_key(const std::string& key, const std::vector<std::string>& known) {
  std::string message = "got unknown key '" + key + "', wanted one of: " + join(known) + did_you_mean(key, known);
  for (const EntryKey& outer : policy_keys()) {
    const std::string form = outer.form;
    const bool inside = form.find("{" + key + ":") != form.npos || form.find(" " + key + ":") != form.npos;
    if (inside && std::find(known.begin(), known.end(), outer.name) != known.end())
      return message + fmt::format("; '{}' stands inside {}: {}", key, outer.name, form);
  }
  return message;
}

MapReader::MapReader(const Node& node, const std::string& what, Problems& problems) : node_(node), problems_(problems) {
  if (node.is(Node::Kind::map) || node.is(Node::Kind::null)) return;
  const auto& keys = policy_keys();
  const auto key = std::find_if(keys.begin(), keys.end(), [&](const EntryKey& k) { return k.name == what; });
  problems.add(node.place, "got " + yaml::describe(node) + " for '" + what + "', wanted " +
                               (key == keys.end() ? "a map" : std::string("a map: ") + key->form));
}

const yaml::Entry* MapReader::take_entry(const std::string& key) {
  if (std::find(known_.begin(), known_.end(), key) == known_.end()) known_.push_back(key);
  return node_.find(key);
}

const Node* MapReader::take(const std::string& key) {
  const yaml::Entry* entry = take_entry(key);
  return entry ? &entry->value : nullptr;
}

std::string MapReader::word(const std::string& key, std::vector<std::string> words,
                            const std::vector<std::string>& later, const std::string& help) {
  const Node* node = take(key);
  if (node && node->is(Node::Kind::scalar) && std::find(later.begin(), later.end(), node->text) != later.end()) {
    problems_.add_unsupported(node->place, key + ": " + node->text);
    return words.front();
  }
  return get<std::string>(make_choice(key, std::move(words), help));
}

ParamValue MapReader::value(const ParamSpec& spec) {
  const Node* node = take(spec.name);
  if (!node) return spec.value;
  return read_value(*node, spec, problems_).value_or(spec.value);
}

Params MapReader::params(const std::vector<ParamSpec>& specs) {
  std::map<std::string, ParamValue, std::less<>> values;
  for (const ParamSpec& spec : specs) values.emplace(spec.name, value(spec));
  return Params(std::move(values));
}

std::vector<const yaml::Entry*> MapReader::rest() const {
  std::vector<const yaml::Entry*> entries;
  for (const yaml::Entry& e : node_.entries)
    if (std::find(known_.begin(), known_.end(), e.key.text) == known_.end()) entries.push_back(&e);
  return entries;
}

void MapReader::finish() {
  for (const yaml::Entry* e : rest()) problems_.add(e->key.place, unknown_key(e->key.text, known_));
}

void note_repeats(const Node& list, Problems& problems) {
  for (auto item = list.items.begin(); item != list.items.end(); ++item) {
    const auto first = std::find_if(list.items.begin(), item, [&](const Node& other) {
      return other.is(Node::Kind::scalar) && item->is(Node::Kind::scalar) && other.text == item->text;
    });
    if (first != item)
      problems.add(item->place, fmt::format("got '{}' twice in a list, wanted it once (first at {})", item->text,
                                            problems.document().where(first->place)));
  }
}

std::vector<Node> expand_axes(const Node& entry, std::size_t most, Problems& problems) {
  Node copy = entry;
  std::vector<Node*> axes;
  collect_axes(copy, axes);
  std::vector<Node> values;
  std::size_t combinations = 1;
  for (const Node* axis : axes) {
    if (axis->items.empty()) {
      problems.add(axis->place, "got an empty list, wanted at least one value");
      return {};
    }
    for (const Node& item : axis->items)
      if (holds_list(item)) {
        problems.add(item.place, "got a list inside a list, wanted a value of an axis");
        return {};
      }
    note_repeats(*axis, problems);
    if (axis->items.size() > most / combinations) {
      problems.add(axis->place, fmt::format("got more than {} combinations of lists", most));
      return {};
    }
    combinations *= axis->items.size();
    values.push_back(*axis);
  }
  std::vector<Node> expanded;
  expanded.reserve(combinations);
  for (std::size_t n = 0; n < combinations; ++n) {
    std::size_t rest = n;
    for (std::size_t a = axes.size(); a-- > 0;) {
      *axes[a] = values[a].items[rest % values[a].items.size()];
      rest /= values[a].items.size();
    }
    expanded.push_back(copy);
  }
  return expanded;
}

}  // namespace kvlab
