// The command line turns words into calls, and errors into messages and exit codes.
#pragma once

namespace kvlab {

// Exit codes: 0 done; 1 a failure inside a cell; 2 an error found before the first cell; 3 no network, device or
// driver.
int run_cli(int argc, char** argv);

}  // namespace kvlab
