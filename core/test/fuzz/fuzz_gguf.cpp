#include <kvlab/error.hpp>

#include "model/gguf_checkpoint.hpp"
#include "test/fuzz/fuzz_input.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const kvlab::fuzz::MemoryFile file(data, size);
  try {
    const auto model = kvlab::open_gguf(file.path());
    for (const std::string& name : model->names()) model->read(name);
    if (model->tokenizer() != nullptr) model->tokenizer()->encode("The 12 cats' \xff\n <|im_start|>");
  } catch (const kvlab::Error&) {
  }
  return 0;
}
