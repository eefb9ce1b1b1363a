// Typed reading of a YAML tree. Every error is noted with its place and reading goes on, so that one run of
// `kvlab check` shows all of them.
#pragma once
#include <kvlab/error.hpp>
#include <kvlab/note.hpp>

#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "experiment/document.hpp"

namespace kvlab {

// All errors of an experiment, in the order found. what() and where() are the first one's.
class ExperimentError : public Error {
 public:
  explicit ExperimentError(std::vector<Error> all)  // not empty
      : Error(all.front()), errors_(std::move(all)) {}
  const std::vector<Error>& errors() const { return errors_; }

 private:
  std::vector<Error> errors_;
};

// Notes errors. It notes the same message at the same place once, since an entry is read once per value of its axes.
class Problems {
 public:
  explicit Problems(const yaml::Document& document) : document_(document) {}
  void add(yaml::Place place, const std::string& message, Errc code = Errc::config);
  void add_unsupported(yaml::Place place, const std::string& what);  // "got WHAT, which is not in this version ..."
  bool empty() const { return errors_.empty(); }
  std::size_t size() const { return errors_.size(); }
  void raise() const;  // throws ExperimentError if there is anything
  const yaml::Document& document() const { return document_; }

 private:
  const yaml::Document& document_;
  std::vector<Error> errors_;
  std::set<std::string> seen_;
};

template <class T>
ParamSpec make_param(std::string name, T value, std::string help) {
  return make_param(std::move(name), std::move(value), -any, any, std::move(help));
}
// One of `words`; the first is the default.
ParamSpec make_choice(std::string name, std::vector<std::string> words, std::string help);

// A scalar as `spec` declares it, or nothing and a note.
std::optional<ParamValue> read_value(const yaml::Node& node, const ParamSpec& spec, Problems& problems);

// Bytes with an optional unit: 1048576, 512MiB (2^20), 68GB (10^9). Positive.
std::optional<std::int64_t> read_bytes(const yaml::Node& node, Problems& problems);

// "got key 'buget', wanted one of: batch, budget (did you mean 'budget'?)"
std::string unknown_key(const std::string& key, const std::vector<std::string>& known);

// The keys of one map. Ask for every key that the map may have, then call finish(), which notes all others.
class MapReader {
 public:
  // `what` names the map in messages. A node that is no map is noted and reads as an empty one; a YAML null is empty.
  MapReader(const yaml::Node& node, const std::string& what, Problems& problems);

  const yaml::Node* take(const std::string& key);  // null when absent
  const yaml::Entry* take_entry(const std::string& key);
  // One of `words`, the first when absent. One of `later` is noted as not in this version, and no message offers it.
  std::string word(const std::string& key, std::vector<std::string> words, const std::vector<std::string>& later,
                   const std::string& help);
  template <class T>  // an absent or wrong value is the spec's default
  T get(const ParamSpec& spec) {
    return params({spec}).get<T>(spec.name);
  }
  ParamValue value(const ParamSpec& spec);
  Params params(const std::vector<ParamSpec>& specs);  // the value of each
  std::vector<const yaml::Entry*> rest() const;        // entries not taken
  void finish();                                       // notes every key that was not taken
  const yaml::Node& node() const { return node_; }

 private:
  const yaml::Node& node_;
  Problems& problems_;
  std::vector<std::string> known_;
};

// Notes every scalar that `list` repeats, with both places.
void note_repeats(const yaml::Node& list, Problems& problems);

// Every list inside `entry` is an axis: one copy of the entry per combination, the last axis fastest. An empty list, a
// list inside a list, a value twice in a list and more than `most` combinations are noted.
std::vector<yaml::Node> expand_axes(const yaml::Node& entry, std::size_t most, Problems& problems);

}  // namespace kvlab
