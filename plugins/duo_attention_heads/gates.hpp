// The files of gates that DuoAttention's authors publish (full_attention_heads.tsv).
#pragma once
#include <kvlab/error.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace duo_attention {

// A line for each layer with a number for each KV head, divided by white space. Empty lines are skipped. [layer, head]
inline std::vector<float> read_gates(const std::string& path, int layers, int kv_heads) {
  std::ifstream in(path);
  if (!in) throw kvlab::Error(kvlab::Errc::io, "got no such file, wanted a line of gates for each layer", path);
  std::vector<float> gates;
  std::string line;
  int number = 0;
  for (int seen = 0; std::getline(in, line);) {
    ++number;
    const auto where = path + ":" + std::to_string(number);
    std::istringstream words(line);
    std::size_t count = 0;
    for (std::string word; words >> word; ++count) {
      std::size_t end = 0;
      try {
        gates.push_back(std::clamp(std::stof(word, &end), 0.f, 1.f));
      } catch (const std::exception&) {
        end = 0;
      }
      if (end != word.size() || std::isnan(gates.back()))
        throw kvlab::Error(kvlab::Errc::data, "got '" + word + "', wanted a gate: a number from 0 to 1", where);
    }
    if (count == 0) continue;
    if (count != static_cast<std::size_t>(kv_heads) || seen == layers)
      throw kvlab::Error(kvlab::Errc::data,
                         "got " + std::to_string(count) + " gates in layer " + std::to_string(seen) + ", wanted " +
                             std::to_string(kv_heads) + " in each of the model's " + std::to_string(layers) + " layers",
                         where);
    ++seen;
  }
  if (gates.size() != static_cast<std::size_t>(layers) * static_cast<std::size_t>(kv_heads))
    throw kvlab::Error(kvlab::Errc::data,
                       "got gates of " + std::to_string(gates.size() / static_cast<std::size_t>(kv_heads)) +
                           " layers, wanted the model's " + std::to_string(layers),
                       path);
  return gates;
}

}  // namespace duo_attention
