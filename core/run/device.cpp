#include "run/device.hpp"

#include <algorithm>
#include <kvlab/error.hpp>

#include "base/backend.hpp"

namespace kvlab {

Device choose_device(const std::string& backend, const std::vector<DType>& models, const std::string& where) {
  if (backend == "cuda") {
    require_cuda(where.c_str());
    return Device::cuda;
  }
  const bool wide = std::count(models.begin(), models.end(), DType::f32) > 0;
  return backend == "auto" && !wide && cuda_backend() ? Device::cuda : Device::cpu;
}

Experiment with_backend(Experiment e) {
  std::vector<DType> models;
  for (const ModelSpec& model : e.models) models.push_back(model.dtype);
  e.backend = choose_device(e.backend, models, e.backend_where) == Device::cuda ? "cuda" : "cpu";
  return e;
}

}  // namespace kvlab
