// A loop over rows that do not depend on each other, on all OpenMP threads that work (base/threads.hpp).
#pragma once
#include <cstdint>
#include <exception>

namespace kvlab {

// Calls body(row) for each of `rows` rows. Throws the first error that one throws, after all others are done.
template <class Body>
void over_rows(std::int64_t rows, Body body) {
  std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic) if (rows > 1)
  for (std::int64_t row = 0; row < rows; ++row) {
    try {
      body(row);
    } catch (...) {
#pragma omp critical(kvlab_over_rows)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace kvlab
