// Metrics: how near an answer comes to the accepted ones. A metric decides by its parameters and arguments alone.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "kvlab/task.hpp"

namespace kvlab {

class AnswerMetric {
 public:
  virtual ~AnswerMetric() = default;
  // The score of the answer, 0 to 1. references: the accepted answers, never empty, none of them blank. record: the
  // data of the question, field by field; without fields where the task gave none. A score that cannot be measured is
  // an Error, never 0.
  virtual double score(const std::string& answer, const std::vector<std::string>& references,
                       const Record& record) const = 0;
  // Throws Error for a question that the metric cannot score. Called for every question before the run.
  virtual void check(const std::vector<std::string>& /*references*/, const Record& /*record*/) const {}
};

// Takes each reference alone, and the best score counts.
class PairMetric : public AnswerMetric {
 public:
  double score(const std::string& answer, const std::vector<std::string>& references,
               const Record& record) const final {
    double best = 0;
    for (const std::string& reference : references) best = std::max(best, pair(answer, reference, record));
    return best;
  }

 protected:
  virtual double pair(const std::string& answer, const std::string& reference, const Record& record) const = 0;
};

// A PairMetric of a function: metric<FunctionMetric<f1>>("f1", "...").
template <double (*function)(const std::string& answer, const std::string& reference)>
class FunctionMetric final : public PairMetric {
 protected:
  double pair(const std::string& answer, const std::string& reference, const Record& /*record*/) const override {
    return function(answer, reference);
  }
};

}  // namespace kvlab
