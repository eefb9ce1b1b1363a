#include "result/varying.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace kvlab {
namespace {

// "scorer.snapkv.window" -> "window": the entry's own words.
std::string own_words(const std::string& path) {
  const std::size_t role_end = path.find('.');
  if (role_end == path.npos) return path;
  const std::string role = path.substr(0, role_end);
  if (role != "policy" && role != "scorer" && role != "selector") return path;
  const std::size_t name_end = path.find('.', role_end + 1);
  return name_end == path.npos ? path : path.substr(name_end + 1);
}

// The leaves of a `params` text with their JSON values. An empty object (a plugin without parameters) is null.
std::map<std::string, nlohmann::json> leaves(const std::string& params) {
  std::map<std::string, nlohmann::json> out;
  const nlohmann::json json = nlohmann::json::parse(params, nullptr, false);
  if (!json.is_object() || json.empty()) return out;
  const nlohmann::json flat = json.flatten();
  for (const auto& [path, value] : flat.items()) {
    std::string name = path.substr(1);
    std::replace(name.begin(), name.end(), '/', '.');
    out[own_words(name)] = value;
  }
  return out;
}

std::string spelled(const nlohmann::json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

// "budget.split.adakv" -> "split.adakv"
std::string short_name(const std::string& name) { return name.starts_with("budget.") ? name.substr(7) : name; }

}  // namespace

std::map<std::string, std::string> flat_parameters(const std::string& params) {
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : leaves(params)) out[name] = value.is_null() ? "true" : spelled(value);
  return out;
}

std::string varying_text(const std::string& own, const std::vector<std::string>& others) {
  static const std::set<std::string> amounts{"budget.tokens", "budget.ratio", "budget.bytes"};
  std::vector<std::map<std::string, nlohmann::json>> theirs;
  for (const std::string& other : others) theirs.push_back(leaves(other));
  std::map<std::string, std::string> words;  // by the name in tables
  for (const auto& [name, value] : leaves(own)) {
    if (amounts.count(name)) continue;
    const bool differs = std::any_of(theirs.begin(), theirs.end(), [&, &n = name, &v = value](const auto& other) {
      const auto found = other.find(n);
      return found == other.end() || found->second != v;
    });
    const bool bare = value.is_null() || value == "";
    if (differs) words[short_name(name)] = bare ? "" : "=" + spelled(value);
  }
  std::string text;
  for (const auto& [name, value] : words) text += (text.empty() ? "" : " ") + name + value;
  return text;
}

}  // namespace kvlab
