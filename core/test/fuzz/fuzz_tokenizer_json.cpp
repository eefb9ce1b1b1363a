#include <kvlab/error.hpp>

#include "model/tokenizer_files.hpp"
#include "test/fuzz/fuzz_input.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const kvlab::fuzz::MemoryFile file(data, size);
  try {
    const auto tokenizer = kvlab::tokenizer_from_json(file.path(), {});
    tokenizer->decode(tokenizer->encode("The 12 cats' \xff\n <|im_start|> \u00e9\u4f60"));
  } catch (const kvlab::Error&) {
  }
  return 0;
}
