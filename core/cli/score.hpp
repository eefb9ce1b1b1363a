// `kvlab score DATA ANSWERS`: scores answers that were made elsewhere, by the metric of their data set. No model runs.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvlab {

struct ScoreOptions {
  std::string data, answers, metric, field = "answer", output, format = "table";
  std::vector<std::string> plugin_path;
  bool whole = false;
};

inline constexpr const char* score_help = "score answers that were made elsewhere, by a data set's metric";
inline constexpr const char* score_examples =
    "kvlab score DATA ANSWERS                                    DATA comes from datasets/convert.py\n"
    "kvlab score DATA ANSWERS --field pred                       as LongBench's pred.py writes them\n"
    "kvlab score DATA ANSWERS --metric '{METRIC: {}}' -o SCORES  `kvlab list metrics` names them\n\n"
    "ANSWERS has a JSON object a line with the text of one answer. With a field `id` it belongs to the record of that "
    "id,\n"
    "else the lines are in the order of the records. An answer ends before the first of its data's stop texts, as in\n"
    "`kvlab run`; --whole keeps all of it. The score is the mean of the questions, 0 to 1, with its 95 % interval.\n\n"
    "Exit codes: 0 all answers are scored; 2 a file cannot be read, or an answer is missing, twice there or of no "
    "record.";

void add_score_options(CLI::App* command, ScoreOptions& options);
int score_answers(const ScoreOptions& options);  // the exit code

}  // namespace kvlab
