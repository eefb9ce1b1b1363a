#include "result/varying.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace kvlab {
namespace {

using Leaves = std::map<std::string, std::string>;

// "scorer.snapkv.window" -> "window", "budget.split.adakv" -> "split.adakv": the entry's own words.
std::string short_name(const std::string& path) {
  const std::size_t role_end = path.find('.');
  if (role_end == path.npos) return path;
  const std::string head = path.substr(0, role_end);
  if (head == "budget") return path.substr(role_end + 1);
  if (head != "policy" && head != "scorer" && head != "selector") return path;
  const std::size_t name_end = path.find('.', role_end + 1);
  return name_end == path.npos ? path : path.substr(name_end + 1);
}

// Leaves of a JSON object; what is no JSON has none, an empty object (a plugin without parameters) has no value.
Leaves leaves(const std::string& params) {
  Leaves out;
  const nlohmann::json json = nlohmann::json::parse(params, nullptr, false);
  if (!json.is_object() || json.empty()) return out;
  const nlohmann::json flat = json.flatten();
  for (const auto& [path, value] : flat.items()) {
    std::string name = path.substr(1);
    std::replace(name.begin(), name.end(), '/', '.');
    out[short_name(name)] = value.is_string() ? value.get<std::string>() : value.is_null() ? "" : value.dump();
  }
  return out;
}

}  // namespace

std::string varying_text(const std::string& own, const std::vector<std::string>& others) {
  static const std::set<std::string> amounts{"tokens", "ratio", "bytes"};
  std::vector<Leaves> theirs;
  for (const std::string& other : others) theirs.push_back(leaves(other));
  std::string text;
  for (const auto& [name, value] : leaves(own)) {
    if (amounts.count(name)) continue;
    const bool differs = std::any_of(theirs.begin(), theirs.end(), [&, &n = name, &v = value](const Leaves& other) {
      const auto found = other.find(n);
      return found == other.end() || found->second != v;
    });
    if (differs) text += (text.empty() ? "" : " ") + name + (value.empty() ? "" : "=" + value);
  }
  return text;
}

}  // namespace kvlab
