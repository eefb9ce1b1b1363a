// The metrics that tasks share. Each, by name, scores an answer from 0 to 1 against the accepted references.
#pragma once
#include <string>
#include <vector>

namespace kvlab {

// These take each reference alone, and the best score counts:
//   contains       it is part of the answer, case and white space folded (RULER's string_match_part: Hsieh et al. 2024)
//   exact, prefix  the answer's first line equals it; the answer begins with it; folded
//   f1             token F1, articles and punctuation dropped (SQuAD: Rajpurkar et al. 2016)
//   rouge_l        ROUGE-L F1 (Lin 2004)
//   choice         the answer's first letter A to D that stands alone
//   first_integer  the first run of digits of the answer equals it (InfiniteBench's passkey: Zhang et al. 2024)
//   word           it is one of the answer's words, parted by white space and :"'.,?!{} (InfiniteBench's kv_retrieval)
// These take all references together:
//   contains_all   the share of them that `contains` finds (RULER's string_match_all)
// A task may have a metric of its own instead (Task::score).
double score(const std::string& metric, const std::string& answer, const std::vector<std::string>& references);
std::vector<std::string> metric_names();

// NaN means not measured and is left out. A measured number that is not finite never gets here: it ends the cell.
double mean(const std::vector<double>& values);               // NaN when there is none
double percentile(std::vector<double> values, double share);  // nearest rank; NaN when there is none

}  // namespace kvlab
