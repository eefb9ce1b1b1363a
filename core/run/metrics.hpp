// How an answer is scored: 0 to 1 against the accepted references, by name.
#pragma once
#include <string>
#include <vector>

namespace kvlab {

// contains: a reference is part of the answer, case and white space folded. contains_all: the share of references that
// are. exact: the answer's first line equals a reference, folded. prefix: the answer begins with one. f1: best token F1
// (words, articles and punctuation dropped, as in SQuAD). rouge_l: best ROUGE-L F1. choice: the
// answer's first letter A to D that stands alone.
double score(const std::string& metric, const std::string& answer, const std::vector<std::string>& references);
std::vector<std::string> metric_names();

struct Interval {
  double low, high;
};
// 95% bootstrap interval of the mean of the finite values (2000 resamples, fixed seed); NaN for fewer than two.
Interval mean_interval(const std::vector<double>& values);
double mean(const std::vector<double>& values);               // of the finite ones; NaN when there is none
double percentile(std::vector<double> values, double share);  // nearest rank; NaN when empty

}  // namespace kvlab
