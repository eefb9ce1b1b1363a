// Ends the process while the system's loader runs its constructors, as a damaged library does.
#include <cstdlib>

namespace {
struct Crash {
  Crash() { std::abort(); }
} crash;
}  // namespace
