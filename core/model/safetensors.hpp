// One safetensors file: a JSON header and the tensors' bytes. Every offset is checked against the file when it is
// opened; each byte of data belongs to exactly one tensor. https://huggingface.co/docs/safetensors
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "model/mapped_file.hpp"
#include "model/stored_tensor.hpp"

namespace kvlab {

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  // Tensors of F32, F16 and BF16. Others are left out, but a weight or a bias of another type is Errc::unsupported.
  const std::map<std::string, StoredTensor, std::less<>>& tensors() const { return tensors_; }
  const std::string& where() const { return where_; }

 private:
  MappedFile file_;
  std::string where_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
};

}  // namespace kvlab
