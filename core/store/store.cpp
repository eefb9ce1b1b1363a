#include "store/store.hpp"

#include <algorithm>

#include "store/cpu_store.hpp"
#include "store/cuda_store.hpp"

namespace kvlab {

Store::Store(const StoreOptions& options, Stream stream)
    : options_(options),
      stream_(stream),
      pages_per_head_(static_cast<std::size_t>(options.shape.max_pages())),
      position_(static_cast<std::size_t>(options.shape.max_slots)),
      step_(static_cast<std::size_t>(options.shape.max_slots)),
      used_(static_cast<std::size_t>(options.shape.max_slots)),
      workspace_(ledger_, stream) {}

int Store::open() {
  for (std::size_t i = 0; i < used_.size(); ++i)
    if (!used_[i]) {
      used_[i] = true;
      return static_cast<int>(i);
    }
  return -1;
}

std::vector<std::int32_t> Store::positions(int layer, int slot, int head) const {
  std::vector<std::int32_t> out = positions_by_place(layer, slot, head);
  std::sort(out.begin(), out.end());
  return out;
}

void check_store(const StoreOptions& options, Device device) {
  device == Device::cuda ? CudaStore::check(options) : CpuStore::check(options);
}

std::unique_ptr<Store> make_store(const StoreOptions& options, Stream stream) {
  if (stream.device() == Device::cuda) return std::make_unique<CudaStore>(options, stream);
  return std::make_unique<CpuStore>(options);
}

}  // namespace kvlab
