// Schema version 1: the layout of the structs of results.hpp in an HDF5 file. Callers hold h5::lock().
#pragma once
#include <string>
#include <vector>

#include "result/h5.hpp"
#include "result/results.hpp"

namespace kvlab::results {

void check_id(const std::string& id);        // Errc::internal unless it may name a file and a group
void check_lengths(const CellResult& cell);  // Errc::internal unless every piece fits the others

void write_info(const h5::File& file, const RunInfo& info);
RunInfo read_info(const h5::File& file);  // Errc::result_file on another schema version

bool is_recording(const h5::File& file);      // of replay/recording_file.hpp
void refuse_recording(const h5::File& file);  // Errc::result_file: it has neither cells nor a summary

void write_summary_rows(const h5::File& file, const std::vector<SummaryRow>& rows);
std::vector<SummaryRow> read_summary_rows(const h5::File& file);  // checks the schema version

void write_cell_group(const h5::File& file, const CellResult& cell);
CellResult read_cell_group(const h5::File& file, const std::string& id);

// Copies the group of one cell unchanged (H5Ocopy), without its summary row.
void copy_cell(const h5::File& from, const h5::File& to, const std::string& id);

}  // namespace kvlab::results
