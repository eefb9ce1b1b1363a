// `kvlab verify F.h5`: a result file against this tree (run/verify.hpp).
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvlab {

struct VerifyOptions {
  std::string file, experiment, paper, format = "table";  // paper: "PAPER/ITEM"; empty: those of the experiment
  std::vector<std::string> plugin_path;
};

inline constexpr const char* verify_help =
    "compare a result file with this tree: plugins, models, prompts, versions, published values";
inline constexpr const char* verify_examples =
    "kvlab verify results/mine.h5\n"
    "kvlab verify theirs.h5 --experiment experiments/mine.yaml    the folder that its relative paths start at\n"
    "kvlab verify mine.h5 --paper PAPER/table3    the values of this table, whatever experiment made the file\n\n"
    "It runs no model. The experiment's text comes from the file; cells and prompts are made of it anew, and the rest\n"
    "is hashes. A cell's id hashes its settings, data, model and plugins, so it differs when any of these does.\n"
    "Of an experiment that `kvlab reproduce` lists, the published values stand beside the file's: inside its interval "
    "or\n"
    "not, with what may differ. They change no exit code.\n"
    "`not recorded`: an earlier kvlab wrote the file. `not here`: this machine lacks it.\n\n"
    "Exit codes: 0 all that can be compared is the same; 1 something differs; 2 the file, or its experiment, cannot "
    "be\n"
    "read here.";

void add_verify_options(CLI::App* command, VerifyOptions& options);
int verify(const VerifyOptions& options);  // the exit code

}  // namespace kvlab
