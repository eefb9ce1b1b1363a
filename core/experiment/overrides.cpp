#include "experiment/overrides.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.hpp"
#include "experiment/entry.hpp"
#include "experiment/experiment_keys.hpp"

namespace kvlab {
namespace {

using yaml::Node;

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t dot = path.find('.', begin);
    parts.push_back(path.substr(begin, dot - begin));
    if (dot == std::string::npos) return parts;
    begin = dot + 1;
  }
}

// The value of `key` in the map `node`, created when absent. A YAML null becomes an empty map; any other node gives a
// null pointer.
Node* child(Node& node, const std::string& key, yaml::Place place) {
  if (node.is(Node::Kind::null)) node.kind = Node::Kind::map;
  if (!node.is(Node::Kind::map)) return nullptr;
  if (yaml::Entry* e = node.find(key)) return &e->value;
  yaml::Entry entry;
  entry.key.kind = Node::Kind::scalar;
  entry.key.text = key;
  entry.key.place = place;
  entry.value.place = place;
  node.entries.push_back(std::move(entry));
  return &node.entries.back().value;
}

// Writes `value` below `node`. A bare name X on the way becomes {X: {}}: `scorer.snapkv.window` needs the map.
void write(Node& node, const std::vector<std::string>& parts, std::size_t next, const Node& value, yaml::Place place,
           const std::string& path, Problems& problems) {
  Node* at = &node;
  for (; next < parts.size(); ++next) {
    if (at->is(Node::Kind::scalar) && at->text == parts[next]) {
      const Node word = *at;
      at->kind = Node::Kind::map;
      at->text.clear();
      at->entries.push_back({word, Node{}});
    }
    Node* below = child(*at, parts[next], place);
    if (!below) {
      problems.add(place, fmt::format("got '{}', but what holds '{}' is {}, wanted a map", path, parts[next],
                                      yaml::describe(*at)));
      return;
    }
    at = below;
  }
  *at = value;
}

std::vector<Node*> entries_called(Node& root, const char* section, const std::string& label,
                                  std::vector<std::string>* labels) {
  std::vector<Node*> found;
  yaml::Entry* list = root.find(section);
  if (!list || !list->value.is(Node::Kind::list)) return found;
  for (Node& entry : list->value.items) {
    const std::string own = entry_label(entry);
    if (own.empty()) continue;
    if (labels) labels->push_back(own);
    if (own == label) found.push_back(&entry);
  }
  return found;
}

bool is_experiment_key(const std::string& word) {
  const auto& keys = experiment_keys();
  return std::any_of(keys.begin(), keys.end(), [&](const ExperimentKey& key) { return key.name == word; });
}

// `model: PATH` is short for `model: {path: PATH}`.
void path_as_map(Node& root) {
  yaml::Entry* model = root.find("model");
  if (!model || !model->value.is(Node::Kind::scalar)) return;
  const Node path = model->value;
  model->value = Node{};
  model->value.place = path.place;
  *child(model->value, "path", path.place) = path;
}

}  // namespace

void set_path(Node& root, const std::string& path, const Node& value, yaml::Place place, Problems& problems) {
  std::vector<std::string> parts = split(path);
  if (std::find(parts.begin(), parts.end(), "") != parts.end() || parts.size() > yaml::max_depth) {
    problems.add(place, "got the key '" + path + "', wanted words with dots between them");
    return;
  }
  const bool section = parts[0] == "policies" || parts[0] == "tasks";
  if (section && parts.size() == 2) {
    problems.add(place, fmt::format("got '{}', wanted {}.NAME.KEY", path, parts[0]));
    return;
  }
  if (!section || parts.size() == 1) {
    if (is_experiment_key(parts[0])) {
      if (parts[0] == "sweep" && parts.size() > 2) parts = {"sweep", path.substr(path.find('.') + 1)};
      if (parts[0] == "model" && parts.size() > 1) path_as_map(root);
      write(root, parts, 0, value, place, path, problems);
      return;
    }
  }
  const std::size_t first = section ? 1 : 0;
  std::vector<std::string> labels;
  std::vector<Node*> entries;
  for (const char* name : {"policies", "tasks"})
    if (!section || parts[0] == name)
      for (Node* entry : entries_called(root, name, parts[first], &labels)) entries.push_back(entry);
  if (entries.empty()) {
    if (!section)
      for (const std::string& key : experiment_key_names()) labels.push_back(key);
    std::string message =
        fmt::format("got '{}', wanted one of: {}{}", parts[first], join(labels), did_you_mean(parts[first], labels));
    if (!section && !nearest(parts[first], labels))
      message += "; a key of an entry stands behind its name: NAME." + path;
    problems.add(place, message);
    return;
  }
  if (parts.size() == first + 1) {
    problems.add(place, fmt::format("got '{}' as a whole, wanted one of its keys: {}.KEY", path, path));
    return;
  }
  for (Node* entry : entries) write(entry_body(*entry), parts, first + 1, value, place, path, problems);
}

void apply_sets(yaml::Document& document, Problems& problems) {
  for (std::size_t i = 0; i < document.sets.size(); ++i) {
    yaml::Place place;
    place.set = static_cast<int>(i);
    const std::string& text = document.sets[i];
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
      problems.add(place, "got no key=value");
      continue;
    }
    try {
      const Node value = yaml::parse_value(document, std::string_view(text).substr(equals + 1), place.set);
      set_path(document.root, text.substr(0, equals), value, place, problems);
    } catch (const Error& e) {
      problems.add(place, e.message());
    }
  }
}

void apply_sweep(Node& root, Problems& problems) {
  const yaml::Entry* found = root.find("sweep");
  if (!found) return;
  const Node sweep = found->value;
  if (!sweep.is(Node::Kind::map) && !sweep.is(Node::Kind::null)) {
    problems.add(sweep.place, "got " + yaml::describe(sweep) + " for 'sweep', wanted {NAME.KEY: [...]}");
    return;
  }
  for (const yaml::Entry& axis : sweep.entries) {
    if (!axis.value.is(Node::Kind::list)) {
      problems.add(axis.value.place,
                   fmt::format("got {} for '{}', wanted a list of values", yaml::describe(axis.value), axis.key.text));
      continue;
    }
    const std::string head = axis.key.text.substr(0, axis.key.text.find('.'));
    if (head != "policies" && head != "tasks" && is_experiment_key(head)) {
      problems.add(
          axis.key.place,
          fmt::format("got '{}', wanted NAME.KEY of a policy or a task ('seed' and 'model' take lists themselves)",
                      axis.key.text));
      continue;
    }
    set_path(root, axis.key.text, axis.value, axis.key.place, problems);
  }
}

}  // namespace kvlab
