#include <kvlab/error.hpp>

#include "plugin/library_note.hpp"
#include "test/fuzz/fuzz_input.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const kvlab::fuzz::MemoryFile input(data, size);
  try {
    kvlab::library_note(input.path());
  } catch (const kvlab::Error&) {
  }
  return 0;
}
