// What kvlab itself wants of the system and does not get: room for its own files, a process. No cell is at fault, so
// none fails of it: the run stops, and goes on later.
#pragma once
#include <kvlab/error.hpp>

#include <new>
#include <string>

#include "base/memory_reserve.hpp"

namespace kvlab {

class CannotGoOn final : public Error {
 public:
  using Error::Error;
};

// body() on one of kvlab's own files. failed: what is lost with it, "the part could not be written".
template <class Body>
auto on_own_file(const std::string& failed, Body body) {
  try {
    const FreedReserve room;
    return body();
  } catch (const Error& error) {
    throw CannotGoOn(error.code(), failed + ": " + error.what());
  } catch (const std::bad_alloc&) {
    throw CannotGoOn(Errc::io, failed + ": got no memory for its file");
  }
}

}  // namespace kvlab
