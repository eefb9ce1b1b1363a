#include "result/report_layout.hpp"

#include <algorithm>
#include <cstdint>

namespace kvlab::results {
namespace {

// Reads the code point at `at` and moves `at` behind it. A byte that is no UTF-8 stands for itself.
std::uint32_t next_code_point(std::string_view text, std::size_t& at) {
  const auto lead = static_cast<std::uint8_t>(text[at++]);
  const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : lead >= 0xc0 ? 1 : 0;
  std::uint32_t code = more ? lead & (0x3fu >> more) : lead;
  for (int i = 0; i < more && at < text.size() && (static_cast<std::uint8_t>(text[at]) & 0xc0) == 0x80; ++i)
    code = (code << 6) | (static_cast<std::uint8_t>(text[at++]) & 0x3fu);
  return code;
}

bool within(std::uint32_t code, std::uint32_t low, std::uint32_t high) { return code >= low && code <= high; }

std::string padded(const std::string& text, std::size_t width, bool right) {
  const std::string space(width - std::min(width, display_width(text)), ' ');
  return right ? space + text : text + space;
}

std::string join(const std::vector<std::string>& cells, const char* between) {
  std::string line;
  for (const std::string& cell : cells) line += (line.empty() ? "" : between) + cell;
  return line;
}

void table_as_text(const ReportTable& table, bool colour, std::string& out) {
  std::vector<std::size_t> width;
  for (const std::string& h : table.header) width.push_back(display_width(h));
  for (const auto& row : table.rows)
    for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], display_width(row[c]));
  std::size_t total = 0;
  const auto line = [&](const std::vector<std::string>& cells, bool grey) {
    std::string text;
    for (std::size_t c = 0; c < cells.size(); ++c)
      text += (c ? "  " : "") + padded(cells[c], width[c], c >= table.text_columns);
    total = display_width(text);
    text.erase(text.find_last_not_of(' ') + 1);
    out += grey ? "\x1b[90m" + text + "\x1b[0m\n" : text + "\n";
  };
  out += table.title + "\n";
  line(table.header, false);
  out += std::string(total, '-') + "\n";
  for (std::size_t r = 0; r < table.rows.size(); ++r)
    line(table.rows[r], colour && std::count(table.faint.begin(), table.faint.end(), r) > 0);
  for (const std::string& text : table.under) out += text + "\n";
}

void table_as_markdown(const ReportTable& table, std::string& out) {
  out += "### " + escape_markdown(table.title) + "\n\n";
  const auto line = [&](std::vector<std::string> cells) {
    for (std::string& c : cells) c = escape_markdown(c);
    out += "| " + join(cells, " | ") + " |\n";
  };
  line(table.header);
  for (std::size_t c = 0; c < table.header.size(); ++c) out += c < table.text_columns ? "|---" : "|---:";
  out += "|\n";
  for (const auto& row : table.rows) line(row);
  for (const std::string& text : table.under) out += "\n" + escape_markdown(text) + "\n";
}

void table_as_latex(const ReportTable& table, std::string& out) {
  out += "\\begin{table}\n\\caption{" + escape_latex(table.title) + "}\n\\begin{tabular}{" +
         std::string(table.text_columns, 'l') + std::string(table.header.size() - table.text_columns, 'r') +
         "}\n\\hline\n";
  const auto line = [&](std::vector<std::string> cells) {
    for (std::string& c : cells) c = escape_latex(c);
    out += join(cells, " & ") + " \\\\\n";
  };
  line(table.header);
  out += "\\hline\n";
  for (const auto& row : table.rows) line(row);
  out += "\\hline\n\\end{tabular}\n";
  for (const std::string& text : table.under) out += "\n" + escape_latex(text) + "\n";
  out += "\\end{table}\n";
}

}  // namespace

std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::uint32_t c = next_code_point(text, at);
    const bool none = within(c, 0x300, 0x36f) || within(c, 0x200b, 0x200f) || within(c, 0xfe00, 0xfe0f);
    const bool wide = within(c, 0x1100, 0x115f) || within(c, 0x2e80, 0xa4cf) || within(c, 0xac00, 0xd7a3) ||
                      within(c, 0xf900, 0xfaff) || within(c, 0xfe30, 0xfe6f) || within(c, 0xff00, 0xff60) ||
                      within(c, 0xffe0, 0xffe6) || within(c, 0x1f300, 0x1faff) || within(c, 0x20000, 0x3fffd);
    width += none ? 0 : wide ? 2 : 1;
  }
  return width;
}

std::string escape_markdown(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (std::string_view("\\`*_[]<>|#~").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

std::string escape_latex(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = at;
    const std::uint32_t code = next_code_point(text, at);
    switch (code) {
      case '&':
      case '%':
      case '$':
      case '#':
      case '_':
      case '{':
      case '}':
        out += '\\';
        out += static_cast<char>(code);
        break;
      case '\\': out += "\\textbackslash{}"; break;
      case '~': out += "\\textasciitilde{}"; break;
      case '^': out += "\\textasciicircum{}"; break;
      case '<': out += "\\textless{}"; break;
      case '>': out += "\\textgreater{}"; break;
      case '[':  // LaTeX would read it as an option of the line break before it
        out += "{[}";
        break;
      case 0xb1: out += "$\\pm$"; break;
      case 0xd7: out += "$\\times$"; break;
      default: out += text.substr(begin, at - begin);
    }
  }
  return out;
}

std::string quote_csv(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string out = "\"";
  for (char c : text) {
    if (c == '"') out += '"';
    out += c;
  }
  return out + "\"";
}

std::string render(const ReportPage& page, Format format, bool colour) {
  const auto spell = [&](const std::string& text) {
    return format == Format::md ? escape_markdown(text) : format == Format::latex ? escape_latex(text) : text;
  };
  // Markdown and LaTeX join the lines of a paragraph, so each note is a paragraph.
  const char* end = format == Format::table ? "\n" : "\n\n";
  std::string out;
  for (const std::string& origin : page.origins)
    out += format == Format::latex ? "% " + origin + "\n" : spell(origin) + end;
  for (const ReportTable& table : page.tables) {
    if (format != Format::md) out += "\n";
    if (format == Format::table) table_as_text(table, colour, out);
    if (format == Format::md) table_as_markdown(table, out);
    if (format == Format::latex) table_as_latex(table, out);
    if (format == Format::md) out += "\n";
  }
  if (format != Format::md && !(page.notes.empty() && page.warnings.empty())) out += "\n";
  for (std::size_t i = 0; i < page.notes.size(); ++i)
    out += spell("[" + std::to_string(i + 1) + "] " + page.notes[i]) + end;
  for (const std::string& warning : page.warnings) out += spell("warning: " + warning) + end;
  return out;
}

std::string render_csv(const ReportTable& table) {
  std::string out;
  const auto line = [&](const std::vector<std::string>& row) {
    for (std::size_t c = 0; c < row.size(); ++c) out += (c ? "," : "") + quote_csv(row[c]);
    out += "\n";
  };
  line(table.header);
  for (const auto& row : table.rows) line(row);
  return out;
}

}  // namespace kvlab::results
