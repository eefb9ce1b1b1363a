// Which codec goes with which method: every codec plugin beside every method of the catalog. A new plugin joins by
// itself.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "experiment/policy_spec.hpp"
#include "model/model.hpp"

namespace kvlab {

struct CodecCell {
  PolicySpec spec;      // without a budget; `profile` is any text where a plugin reads one
  std::string refused;  // why core refuses it before a run; empty: it runs
};

struct CodecTable {
  std::string title, rows, columns;  // rows, columns: what the names are of
  std::vector<std::string> row_names, column_names;
  std::vector<std::vector<CodecCell>> cells;  // [row][column]
};

// How an entry names a plugin: by default with the defaults of its parameters.
using PluginChoice = std::function<PluginUse(const PluginInfo&)>;

// Three tables: codecs on the device beside each method, codecs of pages on the host beside each method that may have
// some, and pairs of codecs of both tiers. Methods are the full cache, each scorer, selector and policy, and each
// pruner, rescorer and budget split beside the first method that takes it. Policies are built and their caches checked
// for this model and device; nothing runs.
std::vector<CodecTable> codec_tables(const PluginCatalog& catalog, const Model& model, Device device, int page_size,
                                     const PluginChoice& choice = {});

// The tables as a Markdown page: "ok", or the number of the reason below. In front of them a table of the codecs, which
// says of each whether it saves bytes.
std::string codec_page(const PluginCatalog& catalog, const std::vector<CodecTable>& tables,
                       const std::string& made_for);

}  // namespace kvlab
