#include "base/terminal.hpp"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace kvlab {
namespace {

std::string_view value_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

}  // namespace

bool is_terminal(int fd) {
  const std::string_view term = value_of("TERM");
  return isatty(fd) && !term.empty() && term != "dumb";
}

bool takes_colour(int fd) { return is_terminal(fd) && value_of("NO_COLOR").empty(); }

}  // namespace kvlab
