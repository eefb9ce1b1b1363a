// Tables that set policies against another one, question by question (result/paired.hpp). They stand under the tables
// of scores, where a cell keeps everything, and alone for any two policies.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "result/answers.hpp"
#include "result/interval.hpp"
#include "result/report_blocks.hpp"
#include "result/report_layout.hpp"

namespace kvlab::results {

// What a report knows of a row's answers.
struct RowSamples {
  std::size_t file = 0;  // where several are reported
  std::vector<SampleRow> samples;
};
using Samples = std::map<const SummaryRow*, const RowSamples*>;

// Does the policy keep everything, in the run's dtype and on its device? Its params then name nothing but a page size.
bool keeps_everything(const SummaryRow& row);

// The answers of the group's cells of `repeat`, or of all of them for -1.
Answers answers_of(const Group& group, const Samples& samples, std::int64_t repeat = -1);

// The 95 % interval of the score of all of a group's cells, over their contexts (result/interval.hpp).
Interval pooled_interval(const Group& group, const Samples& samples);

// Every row of the block against the first one that keeps everything, or that of its own file. Another one that keeps
// everything, and its repeats, measure the noise floor. None if the block has no such row, no other row or no scores,
// and for random weights.
std::optional<ReportTable> against_full(const Block& block, const Samples& samples, std::vector<std::string>& notes);

// The row that `own` names against the one that `other` names, in every block that has both. A name is a row's policy,
// as the tables spell it, with its budget where several rows have that policy: "snap 64". Errc::config if no block has
// both, or if a name fits several rows.
std::vector<ReportTable> against(const std::string& own, const std::string& other, const std::vector<Block>& blocks,
                                 const Samples& samples, std::vector<std::string>& notes);

}  // namespace kvlab::results
