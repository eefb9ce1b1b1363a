// The layout of a report: tables of finished text, and their spelling in each format.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "result/report.hpp"

namespace kvlab::results {

struct ReportTable {
  std::string title;
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;  // each as long as the header
  std::size_t text_columns = 1;                // the first ones, flush left; the others are numbers
  std::vector<std::size_t> faint{};            // rows that a terminal shows in grey
  std::vector<std::string> under{};            // lines below the table
};

struct ReportPage {
  std::vector<std::string> origins;  // of each file: version, time, machine and device of the run
  std::vector<ReportTable> tables;
  std::vector<std::string> notes;  // without their number: note i is [i + 1] in the tables
  std::vector<std::string> warnings;
};

// Not csv. colour: `faint` rows of Format::table are grey (an escape sequence of a terminal).
std::string render(const ReportPage& page, Format format, bool colour = false);
std::string render_csv(const ReportTable& table);  // header and rows

std::size_t display_width(std::string_view text);  // terminal columns of UTF-8
std::string escape_markdown(std::string_view text);
std::string escape_latex(std::string_view text);
std::string quote_csv(std::string_view text);  // quoted where RFC 4180 asks for it

}  // namespace kvlab::results
