// `sampling:` of an experiment: answers are drawn in place of the most likely tokens.
#pragma once
#include <cstdint>
#include <string>

#include "experiment/reader.hpp"

namespace kvlab {

struct SamplingSpec {
  double temperature = 0;  // 0 = each token is the most likely one
  double top_p = 1;        // above 0
  int top_k = 0;           // 0 = all tokens
  int draws = 1;           // answers to each question
  std::int64_t seed = 0;

  bool on() const { return temperature > 0; }
  std::string text() const;  // "temperature 0.6, top_p 0.95, 8 draws, seed 1"; "" unless on()
};

const std::vector<ParamSpec>& sampling_keys();
// Errors are noted.
SamplingSpec read_sampling(const yaml::Node& node, Problems& problems);

}  // namespace kvlab
