#include "experiment/entry.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "experiment/entry_keys.hpp"

namespace kvlab {
namespace {

using yaml::Entry;
using yaml::Node;

bool is_body_key(std::string_view key) {
  return std::any_of(policy_keys().begin(), policy_keys().end(), [&](const EntryKey& k) { return key == k.name; });
}

// {PLUGIN: {...}} as opposed to {name: NAME, ...}.
const Entry* named_form(const Node& entry) {
  if (!entry.is(Node::Kind::map) || entry.entries.empty()) return nullptr;
  for (const char* key : {"name", "policy", "scorer", "selector", "task"})
    if (entry.find(key)) return nullptr;
  const Entry& first = entry.entries.front();
  return is_body_key(first.key.text) ? nullptr : &first;
}

}  // namespace

std::string use_name(const Node& node) {
  if (node.is(Node::Kind::scalar)) return node.text;
  if (node.is(Node::Kind::map) && node.entries.size() == 1) return node.entries.front().key.text;
  return "";
}

std::optional<EntryParts> split_entry(const Node& entry, const char* kind, Problems& problems) {
  EntryParts parts;
  if (entry.is(Node::Kind::scalar)) {
    parts.name = entry;
    return parts;
  }
  if (!entry.is(Node::Kind::map) || entry.entries.empty()) {
    problems.add(entry.place,
                 fmt::format("got {} as a {}, wanted NAME or {{NAME: {{...}}}}", yaml::describe(entry), kind));
    return std::nullopt;
  }
  if (const Entry* first = named_form(entry)) {
    if (entry.entries.size() > 1) {
      const Node& second = entry.entries[1].key;
      problems.add(second.place, fmt::format("got key '{}' beside '{}', wanted it inside: indent it further than '{}'",
                                             second.text, first->key.text, first->key.text));
      return std::nullopt;
    }
    parts.name = first->key;
    parts.body = first->value;
    return parts;
  }
  parts.named = false;
  parts.body = entry;
  if (const Entry* e = parts.body.find("name")) {
    if (!e->value.is(Node::Kind::scalar) || e->value.text.empty()) {
      problems.add(e->value.place, "got " + yaml::describe(e->value) + " for 'name', wanted a word");
      return std::nullopt;
    }
    parts.name = e->value;
  }
  return parts;
}

std::string entry_label(const Node& entry) {
  if (entry.is(Node::Kind::scalar)) return entry.text;
  if (const Entry* named = named_form(entry)) return named->key.text;
  for (const char* key : {"name", "policy", "scorer", "selector", "task"})
    if (const Entry* e = entry.find(key)) return use_name(e->value);
  return "";
}

Node& entry_body(Node& entry) {
  if (entry.is(Node::Kind::scalar)) {
    Node map;
    map.kind = Node::Kind::map;
    map.place = entry.place;
    map.entries.push_back({entry, Node{}});
    map.entries.front().value.place = entry.place;
    entry = std::move(map);
  }
  return named_form(entry) ? entry.entries.front().value : entry;
}

}  // namespace kvlab
