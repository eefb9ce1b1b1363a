// Several answers to each question: the draws of a cell, cells that differ in seed alone, or a task that asks a
// question more than once. A repeat of a cell has the same answers, and does not count.
#pragma once
#include <string>

#include "result/report.hpp"

namespace kvlab::results {

// pass@k: the chance that a right answer is among k of the n answers, drawn without putting any back: 1 - C(n - right,
// k) / C(n, k) (Chen et al. 2021, equation 1). 0 <= right <= n, 1 <= k <= n.
double pass_at_k(int n, int right, int k);

// A table for each model and task, a row for each policy: avg@n, the mean score of a question's n answers, and pass@k
// for powers of two and n, each as the mean over questions. n is the fewest answers that a question has. An answer is
// right if its score is 1. Questions are told apart by their prompts. csv is the rows alone, of all tables.
std::string attempts_report(const std::string& path, Format format);

}  // namespace kvlab::results
