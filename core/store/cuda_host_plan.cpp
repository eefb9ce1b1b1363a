// CudaStore has the host plan (Needs::planned_on_host).
#include <algorithm>
#include <vector>

#include "store/cuda_store.hpp"
#include "store/host_plan.hpp"

namespace kvlab {
namespace {

// Copies to and from the host. The vectors live until the copies have run.
class Crossing {
 public:
  explicit Crossing(Stream stream) : stream_(stream) {}
  template <class T>
  std::vector<T> here(const T* there, std::size_t count) const {
    std::vector<T> out(count);
    copy_memory(out.data(), there, count * sizeof(T), stream_);
    return out;
  }
  // The elements of a view from the first to the last, whatever lies between them.
  template <class T, int Rank>
  std::vector<T> here(const View<const T, Rank>& there) const {
    std::size_t last = 0;
    for (int i = 0; i < Rank; ++i)
      if (there.extent[i] > 0) last += static_cast<std::size_t>((there.extent[i] - 1) * there.stride[i]);
    return here(there.data, last + 1);
  }
  template <class T>
  void back(const std::vector<T>& from, T* there) const {
    copy_memory(there, from.data(), from.size() * sizeof(T), stream_);
  }
  void wait() const { synchronize(stream_); }

 private:
  Stream stream_;
};

// A layer whose numbers are copies of the host.
struct LayerHere {
  CudaStoreLayer layer;
  std::vector<CudaStoreCounters> counters;
  std::vector<std::int32_t> length, lower, free[pools], rest[pools];

  LayerHere(const CudaStoreLayer& there, int slots, const Crossing& cross) : layer(there) {
    const auto heads = static_cast<std::size_t>(slots) * static_cast<std::size_t>(there.kv_heads);
    counters = cross.here(there.counters, 1);
    length = cross.here(there.length, heads);
    if (there.lower_pages) lower = cross.here(there.lower_pages, heads);
    cross.wait();
    layer.counters = counters.data();
    layer.length = length.data();
    if (there.lower_pages) layer.lower_pages = lower.data();
    for (const CudaPool pool : {device_pool, lower_pool}) {
      if (!there.pool[pool].ring) continue;
      // Of the list only free frames cross. As neighbours they have places of their own in a list of their number.
      const ops::FramePool& of = there.pool[pool];
      const std::int32_t count = counters[0].free(pool), first = counters[0].taken[pool] % of.capacity,
                         whole = std::min(count, of.capacity - first);
      free[pool] = cross.here(of.ring + first, static_cast<std::size_t>(whole));
      rest[pool] = cross.here(of.ring, static_cast<std::size_t>(count - whole));
    }
    cross.wait();
    for (const CudaPool pool : {device_pool, lower_pool}) {
      if (!there.pool[pool].ring) continue;
      free[pool].insert(free[pool].end(), rest[pool].begin(), rest[pool].end());
      auto& c = counters[0];
      if (const auto count = static_cast<std::int32_t>(free[pool].size()); count > 0)
        std::rotate(free[pool].begin(), free[pool].end() - c.taken[pool] % count, free[pool].end());
      layer.pool[pool] = {free[pool].data(), &c.taken[pool], &c.given[pool], std::max(1, c.free(pool))};
    }
  }
};

int end_of(const std::vector<std::int32_t>& slots) { return 1 + *std::max_element(slots.begin(), slots.end()); }

}  // namespace

void CudaStore::plan_on_host(const CudaStoreLevels& a, int index, const std::vector<std::int32_t>& slots) {
  const Crossing cross(stream_);
  const CudaStoreLayer there = layer(index);
  LayerHere here(there, end_of(slots), cross);
  const std::vector<std::uint8_t> levels = cross.here(a.levels);
  const auto heads = slots.size() * static_cast<std::size_t>(there.kv_heads), most = static_cast<std::size_t>(a.most),
             p = static_cast<std::size_t>(there.layout.page_size);
  std::vector<CudaStoreLevels::Begin> begins(heads * static_cast<std::size_t>(a.chunks()));
  std::vector<PageEntry> fresh(heads * ((most + p - 1) / p));
  std::vector<CudaStoreLevels::Plan> plans(heads);
  CudaStoreLevels own = a;
  own.slots = slots.data();
  own.levels.data = levels.data();
  own.begins = begins.data(), own.fresh = fresh.data(), own.plans = plans.data();
  cross.wait();
  host_plan::levels(here.layer, own);
  cross.back(begins, a.begins), cross.back(fresh, a.fresh), cross.back(plans, a.plans);
  cross.back(here.counters, there.counters);
  cross.wait();
}

void CudaStore::plan_on_host(const CudaStoreEncode& a, int index, const std::vector<std::int32_t>& slots) {
  const Crossing cross(stream_);
  const CudaStoreLayer there = layer(index);
  LayerHere here(there, end_of(slots), cross);
  const std::vector<PageEntry> table =
      cross.here(there.table[0], here.length.size() * static_cast<std::size_t>(there.pages));
  const std::vector<std::int32_t> list = cross.here(a.index), count = cross.here(a.count);
  const auto heads = slots.size() * static_cast<std::size_t>(there.kv_heads);
  std::vector<CudaStoreEncode::Run> runs(heads);
  here.layer.table[0] = const_cast<PageEntry*>(table.data());
  CudaStoreEncode own = a;
  own.slots = slots.data();
  own.index.data = list.data(), own.count.data = count.data();
  own.runs = runs.data();
  cross.wait();
  host_plan::encode(here.layer, own);
  cross.back(here.lower, there.lower_pages), cross.back(runs, a.runs);
  cross.back(here.counters, there.counters);
  cross.wait();
}

}  // namespace kvlab
