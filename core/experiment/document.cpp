#include "experiment/document.hpp"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "base/regular_file.hpp"
#include "base/utf8.hpp"

namespace kvlab::yaml {
namespace {

struct Refused {  // thrown through yaml-cpp
  Place place;
  std::string message;
};

Place place_of(const YAML::Mark& mark) { return mark.is_null() ? Place{} : Place{mark.line + 1, mark.column + 1}; }

std::size_t count(const Node& node) {
  std::size_t n = 1;
  for (const Node& i : node.items) n += count(i);
  for (const Entry& e : node.entries) n += 1 + count(e.value);
  return n;
}

// `<<: *base` and `<<: [*a, *b]`: keys of the map itself win, then earlier maps.
void merge_keys(Node& map) {
  const auto merge =
      std::find_if(map.entries.begin(), map.entries.end(), [](const Entry& e) { return e.key.text == "<<"; });
  if (merge == map.entries.end() || merge->key.quoted) return;
  const Entry source = *merge;
  map.entries.erase(merge);
  std::vector<Node> maps = source.value.is(Node::Kind::list) ? source.value.items : std::vector<Node>{source.value};
  for (Node& from : maps) {
    if (!from.is(Node::Kind::map)) throw Refused{source.key.place, "got << with " + describe(from) + ", wanted a map"};
    for (Entry& e : from.entries)
      if (!map.find(e.key.text)) map.entries.push_back(std::move(e));
  }
}

// Builds the tree from yaml-cpp's events: its own node type drops duplicate keys and the places of keys.
class Builder final : public YAML::EventHandler {
 public:
  Node root;

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    Node node;
    node.place = place_of(mark);
    add(std::move(node), anchor);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto it = anchors_.find(anchor);
    if (it == anchors_.end()) throw Refused{place_of(mark), "got an alias inside the value that it stands for"};
    spend(count(it->second), place_of(mark));
    place(it->second);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    Node node;
    node.kind = Node::Kind::scalar;
    node.text = value;
    node.place = place_of(mark);
    node.quoted = tag == "!" || tag == "tag:yaml.org,2002:str";
    if (!node.quoted) check_tag(tag, node.place);
    // Escapes such as "\uD800" make text that the file itself may not hold.
    if (first_bad_utf8(value) != std::string::npos)
      throw Refused{node.place, "got escapes that are no Unicode text or control characters"};
    add(std::move(node), anchor);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(Node::Kind::list, mark, tag, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(Node::Kind::map, mark, tag, anchor);
  }
  void OnMapEnd() override {
    if (!open_.empty()) merge_keys(open_.back().node);
    close();
  }

 private:
  struct Open {
    Node node;
    YAML::anchor_t anchor;
    bool has_key = false;
    Node key;
  };

  static void check_tag(const std::string& tag, Place where) {
    if (!tag.empty() && tag != "?") throw Refused{where, "got the tag '" + tag + "', wanted plain YAML without tags"};
  }
  void spend(std::size_t nodes, Place where) {
    nodes_ += nodes;
    if (nodes_ > max_nodes) throw Refused{where, fmt::format("got more than {} values, aliases expanded", max_nodes)};
  }
  void open(Node::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    Open o;
    o.node.kind = kind;
    o.node.place = place_of(mark);
    o.anchor = anchor;
    check_tag(tag, o.node.place);
    if (open_.size() >= max_depth)
      throw Refused{o.node.place, fmt::format("got more than {} levels of lists and maps", max_depth)};
    spend(1, o.node.place);
    open_.push_back(std::move(o));
  }
  void close() {
    Open o = std::move(open_.back());
    open_.pop_back();
    if (o.anchor) anchors_[o.anchor] = o.node;
    place(std::move(o.node));
  }
  void add(Node node, YAML::anchor_t anchor) {
    spend(1, node.place);
    if (anchor) anchors_[anchor] = node;
    place(std::move(node));
  }
  void place(Node node) {
    if (open_.empty()) {
      root = std::move(node);
      return;
    }
    Open& o = open_.back();
    if (o.node.is(Node::Kind::list)) {
      o.node.items.push_back(std::move(node));
    } else if (!o.has_key) {
      if (!node.is(Node::Kind::scalar)) throw Refused{node.place, "got " + describe(node) + " as a key, wanted a word"};
      if (const Entry* first = o.node.find(node.text))
        throw Refused{node.place,
                      fmt::format("got key '{}' twice (first in line {})", node.text, first->key.place.line)};
      o.key = std::move(node);
      o.has_key = true;
    } else {
      o.node.entries.push_back({std::move(o.key), std::move(node)});
      o.has_key = false;
    }
  }

  std::vector<Open> open_;
  std::map<YAML::anchor_t, Node> anchors_;
  std::size_t nodes_ = 0;
};

Place place_at(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, offset);
  const std::size_t line_start = before.rfind('\n') + 1;  // npos + 1 = 0
  return {static_cast<int>(std::count(before.begin(), before.end(), '\n')) + 1,
          static_cast<int>(offset - line_start) + 1};
}

Node parse(std::string_view text) {
  if (text.size() > max_file_bytes)
    throw Refused{{}, fmt::format("got more than {} bytes, wanted an experiment file", max_file_bytes)};
  // yaml-cpp takes zero bytes for UTF-16 or UTF-32, so neither may reach it.
  if (const std::size_t bad = first_bad_utf8(text); bad != std::string_view::npos)
    throw Refused{place_at(text, bad), fmt::format("got byte 0x{:02x}, wanted UTF-8 text without control characters",
                                                   static_cast<unsigned char>(text[bad]))};
  std::istringstream in{std::string(text)};
  try {
    YAML::Parser parser(in);
    Builder builder;
    parser.HandleNextDocument(builder);
    Builder second;
    if (parser.HandleNextDocument(second))
      throw Refused{second.root.place, "got a second YAML document, wanted one per file"};
    return std::move(builder.root);
  } catch (const YAML::Exception& e) {
    const yaml::Place place = place_of(e.mark);
    const std::size_t tab = text.starts_with('\t') ? 0 : text.find("\n\t");
    const std::string hint = tab == text.npos ? "" : " (a line begins with a tab, wanted blanks)";
    throw Refused{place, "got text that is no YAML: " + e.msg + hint};
  }
}

void stamp(Node& node, int set) {
  node.place = {};
  node.place.set = set;
  for (Node& i : node.items) stamp(i, set);
  for (Entry& e : node.entries) stamp(e.key, set), stamp(e.value, set);
}

}  // namespace

const Entry* Node::find(std::string_view key) const {
  for (const Entry& e : entries)
    if (e.key.text == key) return &e;
  return nullptr;
}

Entry* Node::find(std::string_view key) { return const_cast<Entry*>(std::as_const(*this).find(key)); }

std::string Document::where(Place p) const {
  if (p.set >= 0) return "--set " + sets[static_cast<std::size_t>(p.set)];
  return p.line == 0 ? file : fmt::format("{}:{}:{}", file, p.line, p.column);
}

std::size_t first_bad_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    const bool control = (c >= 0 && c < ' ' && c != '\t' && c != '\n' && c != '\r') || c == 0x7f;
    const std::size_t length = utf8_length(text, i);
    if (control || length == 0) return i;
    i += length;
  }
  return std::string_view::npos;
}

std::string describe(const Node& node) {
  switch (node.kind) {
    case Node::Kind::null: return "nothing";
    case Node::Kind::list: return "a list";
    case Node::Kind::map: return "a map";
    case Node::Kind::scalar: break;
  }
  constexpr std::size_t longest = 60;
  if (node.text.size() <= longest) return "'" + node.text + "'";
  std::size_t cut = longest;
  while (cut > 0 && (static_cast<unsigned char>(node.text[cut]) & 0xc0) == 0x80) --cut;
  return "'" + node.text.substr(0, cut) + "...'";
}

Document parse_text(std::string text, std::string file) {
  Document document;
  document.file = std::move(file);
  document.text = std::move(text);
  try {
    document.root = parse(document.text);
  } catch (const Refused& r) {
    throw Error(Errc::config, r.message, document.where(r.place));
  }
  return document;
}

Document parse_file(const std::string& path) {
  return parse_text(read_file(path, "an experiment file", max_file_bytes + 1), path);
}

Node parse_value(const Document& document, std::string_view text, int set) {
  try {
    Node node = parse(text);
    stamp(node, set);
    return node;
  } catch (const Refused& r) {
    Place option;
    option.set = set;
    throw Error(Errc::config, r.message, document.where(option));
  }
}

}  // namespace kvlab::yaml
