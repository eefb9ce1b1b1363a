// A task plugin out of the build's own folder, and an environment with a vocabulary of the test data.
#pragma once
#include <unistd.h>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "model/bundled.hpp"
#include "model/gguf.hpp"
#include "model/tokenizer_files.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"
#include "run/task_env.hpp"
#include "test/support/library_under_test.hpp"
#include "test/support/places.hpp"

namespace kvlab::test {

// A bundle of files leaves them out, which are large. There the bundled model's stands in for each.
inline std::shared_ptr<const Tokenizer> test_vocabulary(const std::string& name) {
  static std::map<std::string, std::shared_ptr<const Tokenizer>> known;
  auto& t = known[name];
  if (t) return t;
  const auto file = source_root() / ("core/test/data/vocab/ggml-vocab-" + name + ".gguf");
  t = std::filesystem::exists(file) ? tokenizer_from_gguf(GgufFile(file))
                                    : open_model("bundled/recall", "", ".")->tokenizer();
  return t;
}

class TaskFixture {
 public:
  explicit TaskFixture(std::string task, const std::string& vocabulary = "gpt-2")
      : name_(std::move(task)),
        tokenizer_(test_vocabulary(vocabulary)),
        folder_(std::filesystem::temp_directory_path() / ("kvlab-" + name_ + "-" + std::to_string(getpid()))),
        registry_(library_under_test()) {
    std::filesystem::create_directories(folder_);
  }
  ~TaskFixture() { std::filesystem::remove_all(folder_); }
  TaskFixture(const TaskFixture&) = delete;

  void write(const std::string& file, std::string_view text) const {
    std::ofstream(folder_ / file, std::ios::binary) << text;
  }
  std::filesystem::path path(const std::string& file) const { return folder_ / file; }
  Instance<Task> task(const std::map<std::string, ParamValue>& given) const {
    const PluginInfo& info = registry_.require(Role::task, name_);
    return create<Task>(info, resolve(info, given));
  }
  ModelTaskEnv env(std::uint64_t seed, int questions = 1, int turns = 1) const {
    return {tokenizer_, folder_, seed, questions, turns};
  }

 private:
  std::string name_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::filesystem::path folder_;
  mutable Registry registry_;
};

inline bool is_utf8(std::string_view s) {
  for (std::size_t i = 0; i < s.size();) {
    const auto c = static_cast<unsigned char>(s[i]);
    const std::size_t n = c < 0x80 ? 1 : c < 0xC0 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (n == 0 || i + n > s.size()) return false;
    for (std::size_t k = 1; k < n; ++k)
      if ((static_cast<unsigned char>(s[i + k]) & 0xC0) != 0x80) return false;
    i += n;
  }
  return true;
}

}  // namespace kvlab::test
