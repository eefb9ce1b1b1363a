#include "exec/executor.hpp"

#include "exec/cpu_executor.hpp"
#include "exec/cuda_executor.hpp"

namespace kvlab {

void check_executor(const Model& model, Device device) {
  if (device == Device::cuda) CudaExecutor::check(model);
}

std::unique_ptr<Executor> make_executor(std::shared_ptr<const Model> model, Store& store, bool batch_invariant) {
  if (store.stream().device() == Device::cuda)
    return std::make_unique<CudaExecutor>(std::move(model), static_cast<CudaStore&>(store), batch_invariant);
  return std::make_unique<CpuExecutor>(std::move(model), static_cast<CpuStore&>(store));
}

}  // namespace kvlab
