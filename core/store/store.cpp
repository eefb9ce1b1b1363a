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

PagedKv Store::paged(const PageEntry* entries, const std::int32_t* lengths, const std::int32_t* slots,
                     std::size_t rows) const {
  const Shape& s = options_.shape;
  PagedKv kv;
  kv.table =
      View<const PageEntry, 3>::dense(entries, {s.max_slots, s.kv_heads, static_cast<std::int64_t>(pages_per_head_)});
  kv.length = View<const std::int32_t, 2>::dense(lengths, {s.max_slots, s.kv_heads});
  kv.slots = slots;
  kv.rows = static_cast<int>(rows);
  kv.kv_heads = s.kv_heads;
  kv.head_dim = s.head_dim;
  kv.page_size = s.page_size;
  kv.rope = options_.rope;
  kv.rope_table = options_.rope_table;
  return kv;
}

Summaries Store::summaries_at(const std::byte* layer) const {
  Summaries out;
  out.kind = options_.summary;
  out.dtype = options_.shape.dtype;
  if (options_.summary == Summary::none) return out;
  out.page_stride = summary_bytes_;
  out.head_stride = summary_bytes_ * static_cast<std::int64_t>(pages_per_head_);
  out.slot_stride = out.head_stride * options_.shape.kv_heads;
  out.data = layer;
  return out;
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
