// `kvlab verify`: does this tree still have what a result file was made of? No model runs: prompts are made anew, and
// everything else is a hash.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "experiment/experiment.hpp"
#include "result/results.hpp"

namespace kvlab {

enum class Finding : std::uint8_t { same, differs, not_recorded, not_here };

const char* name_of(Finding finding);  // "same", "differs", "not recorded", "not here"

// What the file has and what is found here, each as a text. Of cells and prompts: counts, and then one line for each
// that differs.
struct Compared {
  std::string what, recorded, here;
  Finding finding = Finding::same;
  bool counts = true;  // false: says what made the file, but another one alone changes no result
};

// The experiment that a file's text describes, as it was given: its overrides stand in `sets`. `file` gives messages a
// name and relative paths their folder.
yaml::Document recorded_experiment(const std::string& text, const std::string& file);

// Compares versions, models (content, tokenizer, chat template, stop ids), plugins, profile files, the cells' ids and
// the SHA-256 of every prompt. A part of a file that earlier versions did not record, and a part that this machine does
// not have, is neither the same nor different. Throws for a file that cannot be read.
std::vector<Compared> compare_with_tree(const std::string& result_file, const Experiment& experiment,
                                        const PluginCatalog& catalog);

}  // namespace kvlab
