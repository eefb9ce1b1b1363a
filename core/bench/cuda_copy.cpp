// Moves pages between the tiers with the store's gather and scatter kernels over pinned memory. A case moves every
// other page of one layer of one sequence in Llama-3.1-8B's shape.
#include <fmt/format.h>

#include <functional>

#include "base/stream_memory.hpp"
#include "bench/cuda_timing.hpp"
#include "model/random_weights.hpp"
#include "store/cuda_store.hpp"

namespace kvlab::bench {
namespace {

constexpr int heads = 8, dim = 128, tokens = 32768, runs = 9;

struct Cache {
  CudaStore store;
  std::vector<std::int32_t> slots;
  std::unique_ptr<DeviceBuffer> index, count;
  PageList pages;
  int listed;  // pages of each head

  Cache(const CudaTimer& timer, int page_size) : store(options(page_size), timer.stream()) {
    const std::int64_t row = std::int64_t{heads} * dim;
    const DeviceBuffer values(static_cast<std::size_t>(tokens * row * 2));
    random_weights(values.as<void>(), DType::bf16, 0, tokens * row, 1, 1, timer.stream());
    slots = {store.open()};
    store.append(0, slots[0], values.as<void>(), values.as<void>(), DType::bf16, row, tokens, 0);
    store.advance(slots[0], tokens, false);
    listed = tokens / page_size / 2;
    std::vector<std::int32_t> all, counts(heads, listed);
    for (int h = 0; h < heads; ++h)
      for (int i = 0; i < listed; ++i) all.push_back(2 * i);
    index = timer.put(all);
    count = timer.put(counts);
    pages.index = View<std::int32_t, 3>::dense(index->as<std::int32_t>(), {1, heads, listed});
    pages.count = View<std::int32_t, 2>::dense(count->as<std::int32_t>(), {1, heads});
  }
  static StoreOptions options(int page_size) {
    StoreOptions o;
    o.shape.layers = 1;
    o.shape.query_heads = 32;
    o.shape.kv_heads = heads;
    o.shape.head_dim = dim;
    o.shape.page_size = page_size;
    o.shape.max_slots = 1;
    o.shape.max_tokens = tokens;
    o.shape.dtype = DType::bf16;
    return o;
  }
  void apply(void (*make)(Edits&, const PageList&)) {
    Edits edits(0);
    make(edits, pages);
    store.apply(edits.all(), slots);
  }
};

double seconds(const CudaTimer& timer, const std::function<void()>& work) {
  return 1e-3 * static_cast<double>(cuda_backend()->runtime.time(
                    timer.handle(), [](void* f) { (*static_cast<const std::function<void()>*>(f))(); },
                    const_cast<std::function<void()>*>(&work)));
}

Times median(std::vector<double> t) {
  std::sort(t.begin(), t.end());
  return {t[t.size() / 2], t.front()};
}

// Bytes per second of a plain copy between pinned and device memory; up: to the device.
double plain_rate(const CudaTimer& timer, bool up) {
  constexpr std::size_t bytes = std::size_t{256} << 20;
  const CudaRuntime& r = cuda_backend()->runtime;
  const DeviceBuffer device(bytes);
  void* host = r.allocate_pinned(bytes);
  if (!host) throw NoRoom("got no pinned memory for a bench");
  std::vector<double> t;
  for (int i = 0; i < 5; ++i)
    t.push_back(seconds(
        timer, [&] { r.copy(up ? device.as<void>() : host, up ? host : device.as<void>(), bytes, timer.handle()); }));
  r.free_pinned(host);
  return bytes / median(t).best;
}

}  // namespace

std::vector<Line> cuda_copy_cases() {
  const CudaTimer timer;
  const double up = plain_rate(timer, true), down = plain_rate(timer, false);
  std::vector<Line> lines;
  for (const int page_size : {8, 16, 32, 64}) {
    Cache cache(timer, page_size);
    std::vector<double> offload, recall;
    for (int i = -1; i < runs; ++i) {
      // While a page has a host copy, an offload of it has nothing to do.
      cache.apply([](Edits& e, const PageList& p) { e.drop(Tier::host, p); });
      const double o = seconds(timer, [&] { cache.apply([](Edits& e, const PageList& p) { e.offload(p); }); });
      cache.apply([](Edits& e, const PageList& p) { e.drop(Tier::device, p); });
      const double r = seconds(timer, [&] { cache.apply([](Edits& e, const PageList& p) { e.recall(p); }); });
      if (i >= 0) offload.push_back(o), recall.push_back(r);
    }
    const double unit = static_cast<double>(cache.store.page_bytes(Tier::host)) / (heads * cache.listed);
    const auto add = [&](const char* what, const std::vector<double>& t, double plain) {
      const Times times = median(t);
      Line l{"copy",
             fmt::format("{} {} pages of {} tokens, {:.0f} B each", what, heads * cache.listed, page_size, unit),
             "pinned memory", times.median, times.best};
      l.bytes = unit * heads * cache.listed;
      l.reads = true;
      l.copy_rate = plain;
      lines.push_back(l);
    };
    add("recall", recall, up);
    add("offload", offload, down);
  }
  return lines;
}

}  // namespace kvlab::bench
