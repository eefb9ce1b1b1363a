// Labels of a cell that do not depend on what else the machine does.
#pragma once
#include <algorithm>
#include <string>
#include <string_view>

#include "result/results.hpp"

namespace kvlab::test {

// All but `disturbed`, which a busy machine adds.
inline std::string lasting_labels(const results::SummaryRow& row) {
  std::string out;
  for (const char* begin = row.labels.c_str(); *begin;) {
    const std::string_view rest(begin), label = rest.substr(0, rest.find(", "));
    if (label != "disturbed") out.append(out.empty() ? "" : ", ").append(label);
    begin += std::min(rest.size(), label.size() + 2);
  }
  return out;
}

}  // namespace kvlab::test
