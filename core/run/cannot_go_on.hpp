// The system denies kvlab itself what it needs: room for its own files, a process. No cell is at fault, so no cell
// fails. The run stops, and the same command goes on later.
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

// Runs body(), which works on one of kvlab's own files. failed: begins the message, e.g. "the part could not be
// written".
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
