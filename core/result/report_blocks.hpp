// The rows of a result file as a report groups them: a block per model, task and context, a group per row of a table.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "result/results.hpp"

namespace kvlab::results {

// Repeats and seeds of one policy with one set of parameters. Borrows the rows.
struct Group {
  std::vector<const SummaryRow*> good, bad;
  const SummaryRow& first() const { return good.empty() ? *bad.front() : *good.front(); }
};

struct Block {
  std::string model, task, workload;
  std::int64_t context = 0;
  std::vector<Group> groups;
};

std::vector<Block> blocks_of(const std::vector<SummaryRow>& rows);

std::string title_of(const Block& block);
std::string policy_text(const Group& group, const Block& block);  // with the parameters that tell it from its likes
std::string budget_text(const Group& group);                      // tokens or megabytes; "-" = none

// The labels of a row without "disturbed", which tells about other processes and not about the cell.
std::vector<std::string> identity_of(const SummaryRow& row);
std::vector<std::string> split_labels(const std::string& labels);

// How a row's policy saves: it evicts tokens for good, or selects what a step reads. unknown: its parameters do not
// tell.
enum class Way : std::uint8_t { unknown, evicts, selects };
Way way_of(const SummaryRow& row);
// "synthetic: random weights ...". What an oracle is depends on the row's way.
std::string label_note(const std::string& label, const SummaryRow& row);

inline bool measured(double v) { return !std::isnan(v); }
std::string number(double v);              // 4 digits; "-" = not measured
std::string of_one_row(std::string text);  // text for a table's row: line ends and tabs become blanks

// Mean over the cells that measured it; "-" if none did.
template <class Get>
double mean_over(const Group& group, Get get) {
  double sum = 0, count = 0;
  for (const SummaryRow* row : group.good)
    if (const double v = get(*row); measured(v)) sum += v, ++count;
  return count > 0 ? sum / count : not_measured;
}

// Footnotes of a page. Equal ones share a number.
class Notes {
 public:
  explicit Notes(std::vector<std::string>& list) : list_(list) {}
  std::string mark(const std::string& note);  // " [2]"

 private:
  std::vector<std::string>& list_;
};

}  // namespace kvlab::results
