// A cell's row of /summary.
#pragma once
#include "result/results.hpp"
#include "run/cell_input.hpp"

namespace kvlab {

// Adds the plugin of an entry to the plugins of a cell or a profile, once.
void add_plugin(std::vector<results::PluginRow>& rows, const PluginUse& use, const PluginCatalog& catalog);

// Fills the columns that are known before anything runs.
void describe_cell(const CellInput& in, results::CellResult& out);

// A sample's row with the columns that are known before it runs. number: place of the sample in the cell.
results::SampleRow sample_row(const Item& item, std::int64_t number);

// Negative log-likelihood of each item's forced tokens, in nats; perplexity is the score of a cell that has any.
struct Forced {
  std::vector<double> nll;  // [item]; empty = no item has forced tokens
};

// Fills scores and fidelity, and for a timed cell latency, from samples, tokens and fidelity. The step log fills memory
// and tokens_per_s.
void summarize(const CellInput& in, const Forced& forced, results::CellResult& out);

}  // namespace kvlab
