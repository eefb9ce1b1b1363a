#include "model/executor.hpp"

#include <kvlab/error.hpp>

#include "model/cpu_executor.hpp"

namespace kvlab {

std::unique_ptr<Executor> make_executor(std::shared_ptr<const Model> model, Store& store) {
  if (store.stream().device() == Device::cuda)
    throw Error(Errc::unsupported, "got device: cuda, wanted device: cpu: models do not run on CUDA yet", model->name);
  return std::make_unique<CpuExecutor>(std::move(model), static_cast<CpuStore&>(store));
}

}  // namespace kvlab
