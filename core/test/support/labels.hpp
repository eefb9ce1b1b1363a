// Labels of a cell that do not depend on what else the machine does.
#pragma once
#include <string>

#include "result/results.hpp"

namespace kvlab::test {

// All but `disturbed`, which a busy machine adds.
inline std::string lasting_labels(const results::SummaryRow& row) {
  const std::string disturbed = "disturbed";
  std::string labels = row.labels;
  if (labels == disturbed) return "";
  if (labels.ends_with(", " + disturbed)) labels.resize(labels.size() - disturbed.size() - 2);
  return labels;
}

}  // namespace kvlab::test
