#include "base/host_memory.hpp"

#include <unistd.h>

#include <catch2/catch.hpp>

TEST_CASE("host memory: some is free, and not more than the machine has") {
  const std::int64_t all = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE),
                     free = kvlab::free_host_bytes();
  CHECK(free > 0);
  CHECK(free <= all);
}
