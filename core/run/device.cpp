#include "run/device.hpp"

#include <algorithm>
#include <kvlab/error.hpp>

#include "base/backend.hpp"
#include "base/log.hpp"
#include "ops/linear/linear.hpp"

namespace kvlab {

Device choose_device(const std::string& backend, const std::vector<DType>& models, const std::string& where) {
  if (backend == "cuda") {
    ops::require_cuda_for_models(where.c_str());
    return Device::cuda;
  }
  const bool wide = std::count(models.begin(), models.end(), DType::f32) > 0;
  if (backend != "auto" || wide || !cuda_backend()) return Device::cpu;
  const LibraryState& blas = ops::cublaslt_state();
  if (blas.there) return Device::cuda;
  log::warn("backend auto is the CPU although there is a GPU; cuBLASLt: " + blas.text);
  return Device::cpu;
}

Experiment with_backend(Experiment e) {
  std::vector<DType> models;
  for (const ModelSpec& model : e.models) models.push_back(model.dtype);
  e.backend = choose_device(e.backend, models, e.backend_where) == Device::cuda ? "cuda" : "cpu";
  return e;
}

}  // namespace kvlab
