// How an answer is scored: 0 to 1 against the accepted references, by name.
#pragma once
#include <string>
#include <vector>

namespace kvlab {

// Against each reference, the best of which counts:
//   contains       it is part of the answer, case and white space folded (RULER's string_match_part: Hsieh et al. 2024)
//   exact, prefix  the answer's first line equals it; the answer begins with it; folded
//   f1             token F1, articles and punctuation dropped (SQuAD: Rajpurkar et al. 2016)
//   rouge_l        ROUGE-L F1 (Lin 2004)
//   choice         the answer's first letter A to D that stands alone
//   first_integer  the first run of digits of the answer equals it (InfiniteBench's passkey: Zhang et al. 2024)
//   word           it is one of the answer's words, parted by white space and :"'.,?!{} (InfiniteBench's kv_retrieval)
// Against all references together:
//   contains_all   the share of them that `contains` finds (RULER's string_match_all)
//   ordered_list   the share of places at which the answer's list has the reference's item. Items are parted by commas,
//                  semicolons and line ends; numbering and what stands before a colon are dropped. Ours: exact at each
//                  place, so that an item too many costs all that follow
//   table_f1       F1 of the cells as (row, column, value), the first column naming the row (text-to-table: Wu, Zhang
//   and
//                  Li 2022). The first reference is the header, the others rows; cells are parted by '|'
//   demands        references are "N: text": the share of them for which entry N of the answer contains the text.
//                   Entries begin with #*#, the first one is number 1.
//   listed_demands the same where entry N is the answer's first line that begins with N.
//                  Entries begin with #*# and their number; one that is missing meets nothing (LongGenBench's STIC-2:
//                  Wu et al. 2024, with a rule in place of a judging model)
double score(const std::string& metric, const std::string& answer, const std::vector<std::string>& references);
std::vector<std::string> metric_names();

// NaN = not measured, and is left out. What was measured and is not finite never gets there: it ends the cell.
double mean(const std::vector<double>& values);               // NaN when there is none
double percentile(std::vector<double> values, double share);  // nearest rank; NaN when there is none

}  // namespace kvlab
