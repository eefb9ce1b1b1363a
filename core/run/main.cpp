#include "base/threads.hpp"
#include "run/cli.hpp"

int main(int argc, char** argv) {
  kvlab::prefer_short_spins(argv);
  return kvlab::run_cli(argc, argv);
}
