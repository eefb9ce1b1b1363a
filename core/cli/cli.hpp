// The command line: words to calls, errors to messages and exit codes.
#pragma once

namespace kvlab {

// 0 done; 1 a failure inside a cell; 2 anything wrong that is found before the first cell; 3 no network, device or
// driver.
int run_cli(int argc, char** argv);

}  // namespace kvlab
