// What a file descriptor's terminal can show.
#pragma once

namespace kvlab {

bool is_terminal(int fd);   // one that can rewrite a line: TERM is set and not "dumb"
bool takes_colour(int fd);  // such a terminal, unless NO_COLOR is set (no-color.org)

}  // namespace kvlab
