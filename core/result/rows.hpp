// The tables of a result file as columns: names, types and units of schema version 1 in one place.
#pragma once
#include <vector>

#include "result/h5.hpp"
#include "result/results.hpp"

namespace kvlab::results {

// Columns in the order of the schema; `rows` may be empty (then only name, type and unit are set).
std::vector<h5::Column> columns_of(const std::vector<SummaryRow>& rows);
std::vector<h5::Column> columns_of(const std::vector<SampleRow>& rows);
std::vector<h5::Column> columns_of(const std::vector<LedgerRow>& rows);
std::vector<h5::Column> columns_of(const std::vector<TraceEvent>& rows);
std::vector<h5::Column> columns_of(const std::vector<PluginRow>& rows);

template <class Row>
std::vector<Row> read_rows(const h5::Location& at, const std::string& name);

extern template std::vector<SummaryRow> read_rows(const h5::Location&, const std::string&);
extern template std::vector<SampleRow> read_rows(const h5::Location&, const std::string&);
extern template std::vector<LedgerRow> read_rows(const h5::Location&, const std::string&);
extern template std::vector<TraceEvent> read_rows(const h5::Location&, const std::string&);
extern template std::vector<PluginRow> read_rows(const h5::Location&, const std::string&);

}  // namespace kvlab::results
