// The texts and ids of llama.cpp's vocabulary tests (core/test/data/vocab/SOURCE.md).
#pragma once
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace kvlab::test {

inline std::string file_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct VocabCase {
  std::string text;
  std::vector<int> ids;
};

// stem: ".../ggml-vocab-gpt-2.gguf". The files .inp and .out lie beside it.
inline std::vector<VocabCase> vocab_cases(const std::string& stem) {
  const std::string separator = "\n__ggml_vocab_test__\n", texts = file_text(stem + ".inp");
  std::istringstream lines(file_text(stem + ".out"));
  std::vector<VocabCase> out;
  for (std::size_t at = 0; at < texts.size();) {
    const auto end = texts.find(separator, at);
    if (end == std::string::npos) break;  // text after the last separator is no case
    VocabCase one{texts.substr(at, end - at), {}};
    std::string line;
    std::getline(lines, line);
    std::istringstream numbers(line);
    for (int id; numbers >> id;) one.ids.push_back(id);
    out.push_back(std::move(one));
    at = end + separator.size();
  }
  return out;
}

}  // namespace kvlab::test
