// What the readers of published values and of targets have in common.
#pragma once
#include <kvlab/error.hpp>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "experiment/document.hpp"
#include "experiment/reader.hpp"
#include "papers/paper.hpp"

namespace kvlab::papers {

// Notes every error of a file at its place and reads on.
class FileReader {
 public:
  using Node = yaml::Node;
  explicit FileReader(const yaml::Document& document) : document_(document), problems_(document) {}

 protected:
  // The values of a map's known keys. Others are noted.
  class Taken {
   public:
    Taken(FileReader& reader, const Node& node, const std::vector<std::string>& known, const std::string& what);
    const Node* operator[](const char* key) const { return node_.find(key) ? &node_.find(key)->value : nullptr; }

   private:
    const Node& node_;
  };

  void wrong(const Node& at, const std::string& got, const std::string& wanted);
  // A text that has to be there.
  std::string text(const Node* node, const char* key, const Node& around);
  std::string word(const Node& node, const std::vector<std::string>& words);
  std::optional<double> number(const Node& node);
  std::vector<std::string> texts(const Node* node);
  std::vector<std::pair<std::string, std::string>> settings(const Node* node);
  // Puts what the map says in place of what `r` has. others: keys of the map that are none of a reading.
  void add(const Node& map, Reading& r, const std::vector<std::string>& others = {});
  void check(const Reading& r, const Node& at);

  const yaml::Document& document_;
  Problems problems_;

 private:
  void over(const Node& node, Reading& r);
};

// The *.yaml of a folder by name; none where there is no folder.
std::vector<std::filesystem::path> yaml_files(const std::filesystem::path& folder);

}  // namespace kvlab::papers
