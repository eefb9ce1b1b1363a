#include "run/cli.hpp"

int main(int argc, char** argv) { return kvlab::run_cli(argc, argv); }
