// `kvlab report --html`: starts the Python package of analysis/, which makes the page.
#pragma once
#include <string>
#include <vector>

namespace kvlab {

// files: result and profile files. out: a folder, which gets index.html, or a file *.html. Returns the package's exit
// code: 0 done, 2 bad input, 3 a Python package is missing. Errc::result_file for a damaged file, before Python starts;
// Errc::network where there is no Python. $KVLAB_PYTHON is the interpreter; without it python3 of PATH and
// /usr/bin/python3 are, whichever has the packages.
int html_report(const std::vector<std::string>& files, const std::string& out);

}  // namespace kvlab
