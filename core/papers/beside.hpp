// Published values beside the cells of our own results.
#pragma once
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "papers/paper.hpp"
#include "result/interval.hpp"
#include "result/profile_file.hpp"
#include "result/report_layout.hpp"
#include "result/results.hpp"

namespace kvlab::papers {

// The results of an item's experiments, by the stem of the experiment's file.
struct OurRun {
  results::Summary summary;
  std::size_t tasks = 1;                                           // of the experiment, also those that have not run
  std::map<std::string, std::vector<results::SampleRow>> samples;  // by the cell's id
  std::map<std::string, std::map<std::string, double>> parts;      // ms of a decode step, by the cell's id and the part
  std::map<std::string, double> fetched;  // bytes, as mean_fetched() has them, by the cell's id
};
struct Ours {
  std::map<std::string, OurRun> runs;
  std::map<std::string, results::ProfileFile> profiles;
};

// What we have for one published value, in the paper's unit. The interval of a ratio of two scores is the bootstrap
// over contexts of result/place.hpp, which draws both scores, question by question. It does not take the score of
// `against`, such as full's, as known.
struct OurValue {
  double value = results::not_measured;
  Interval interval{results::not_measured, results::not_measured};  // 95 %, of scores
  std::string why;                                                  // there is none
};

// What the values of an item need beside the summary and the samples.
struct Extra {
  bool parts = false, ledgers = false;
};
Extra extra_of(const Item& item);

// The cells of a result file, or of the parts of one. tasks: of its experiment.
OurRun read_run(const std::string& file, std::size_t tasks, Extra extra);

// The mean over a cell's decode steps on a GPU. Empty where it has no such parts.
std::map<std::string, double> mean_parts(const results::CellResult& cell);

// Bytes that a step brings to the device from the host, mean over the steps that bring any. NaN where none does.
double mean_fetched(const std::vector<results::LedgerRow>& ledger);

OurValue our_value(const Reading& reading, const Ours& ours);

// The item's settings beside what ran here, then each published value beside ours.
results::ReportPage beside(const std::string& paper, const Item& item, const Ours& ours);
// The same where ours are of the item's small experiments: they have no verdict beside the paper's model and task.
results::ReportPage beside_small(const std::string& paper, const Item& item, const Ours& ours);
// The same for one run of the item, named by its stem. Values of other runs and of profiles are left out, and so are
// rows that cannot run. Only the table of settings where no value is left.
results::ReportPage beside_run(const Chosen& chosen, const std::string& stem, const OurRun& run);
// The values as csv: row, column, published value, ours, the interval, verdict.
std::string beside_csv(const Item& item, const Ours& ours);

}  // namespace kvlab::papers
