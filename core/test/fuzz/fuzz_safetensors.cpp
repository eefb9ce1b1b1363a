#include <kvlab/error.hpp>
#include <vector>

#include "model/safetensors.hpp"
#include "test/fuzz/fuzz_input.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const kvlab::fuzz::MemoryFile input(data, size);
  try {
    const kvlab::SafetensorsFile file(input.path());
    for (const auto& [name, tensor] : file.tensors()) {
      std::vector<float> values(static_cast<std::size_t>(tensor.rows() * tensor.columns()));
      kvlab::dequantize(tensor.type, tensor.data, tensor.rows() * tensor.columns(), values.data());
    }
  } catch (const kvlab::Error&) {
  }
  return 0;
}
