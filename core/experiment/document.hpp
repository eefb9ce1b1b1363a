// A YAML file as a tree in which every key and value knows where it stands. Hostile files (not UTF-8, huge, deeply
// nested, aliases that multiply, duplicate keys) are refused here; no other file sees yaml-cpp.
#pragma once
#include <kvlab/error.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace kvlab::yaml {

inline constexpr std::size_t max_file_bytes = 256 * 1024;
inline constexpr int max_depth = 24;
inline constexpr std::size_t max_nodes = 50'000;  // after aliases are expanded

struct Place {
  int line = 0, column = 0;  // from 1; 0 = the file as a whole
  int set = -1;              // index of the --set option that it comes from
};

struct Entry;

struct Node {
  enum class Kind { null, scalar, list, map } kind = Kind::null;
  std::string text;     // of a scalar
  bool quoted = false;  // a quoted or block scalar: text, whatever it looks like
  Place place;
  std::vector<Node> items;     // of a list
  std::vector<Entry> entries;  // of a map, in the file's order, keys unique

  bool is(Kind k) const { return kind == k; }
  const Entry* find(std::string_view key) const;
  Entry* find(std::string_view key);
};

struct Entry {
  Node key, value;  // the key is a scalar
};

struct Document {
  std::string file;               // as messages name it
  std::string text;               // the file's bytes
  std::vector<std::string> sets;  // "key=value", as given
  Node root;

  std::string where(Place p) const;  // "exp.yaml:3:7" or "--set key=value"
};

// Errc::config with the place of the first thing wrong; Errc::io when the file cannot be read.
Document parse_file(const std::string& path);
Document parse_text(std::string text, std::string file);

// Parses a value of the command line, which is flow YAML ("[1, 2]", "{tokens: 512}", "bf16"). Every node's place is
// option number `set` of the document.
Node parse_value(const Document& document, std::string_view text, int set);

// How a message shows a node: "'window'", "a list", "a map", "nothing".
std::string describe(const Node& node);

// Byte offset of the first byte that is not well-formed UTF-8 or is a control character but no white space, or npos.
std::size_t first_bad_utf8(std::string_view text);

}  // namespace kvlab::yaml
