#include "base/threads.hpp"
#include "cli/cli.hpp"

int main(int argc, char** argv) {
  kvlab::prefer_short_spins(argv);
  kvlab::use_threads(0);
  return kvlab::run_cli(argc, argv);
}
