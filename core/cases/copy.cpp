// Tokens that a store takes in, moves and lets go: the steps of a policy that replaces tokens, and pages that change
// their tier. The cache is read before and after each.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "cases/case.hpp"
#include "cases/numbers.hpp"
#include "cases/paged_fixture.hpp"
#include "store/cpu_store.hpp"
#include "store/cuda_store.hpp"

namespace kvlab::cases {
namespace {

enum class Step { append, evict, drop_and_recall, offload, recall, fetch };

struct Copying {
  Step step;
  int kv_heads, group, dim, page_size, tokens;
  bool state = false;
  CodecSpec host = {};  // codec of pages on the host

  // Page edits take every other page, as a budget of resident pages would. A fetch takes every other token.
  int pages() const { return tokens / page_size / 2; }
  int fetched() const { return tokens / 2; }
  bool fetches() const { return step == Step::fetch; }
  bool coded() const { return host.k.bits > 0; }
  bool moves_pages() const { return step != Step::append && step != Step::evict && !fetches(); }
};

class CopyScene final : public Scene {
  // Key and value by head and text position.
  using Cache = std::map<std::pair<int, std::int32_t>, std::vector<float>>;

 public:
  // A sequence of `layers` layers: copy i is layer i.
  CopyScene(Place& place, const Copying& of, int layers)
      : place_(place), of_(of), layers_(layers), store_(make_store()), slots_{store_->open()} {
    const std::int64_t row = std::int64_t{of.kv_heads} * of.dim;
    rows_ = place.put(randoms(of.tokens * row));
    for (int l = 0; l < layers; ++l) append(l, of.tokens, 0);
    store_->advance(slots_[0], of.tokens, false);
    // Pages, tokens to fetch, or the tokens that stay when the one in the middle leaves.
    const int count = of.moves_pages() ? of.pages() : of.fetches() ? of.fetched() : of.tokens;
    const bool halves = of.moves_pages() || of.fetches();
    std::vector<std::int32_t> index(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) index[static_cast<std::size_t>(i)] = halves ? 2 * i : i < of.tokens / 2 ? i : i + 1;
    std::vector<std::int32_t> all, counts(static_cast<std::size_t>(of.kv_heads), count);
    for (int h = 0; h < of.kv_heads; ++h) all.insert(all.end(), index.begin(), index.end());
    list_ = {View<std::int32_t, 3>::dense(place.put(all), {1, of.kv_heads, count}),
             View<std::int32_t, 2>::dense(place.put(counts), {1, of.kv_heads})};
    if (of.moves_pages())
      for (int l = 0; l < layers; ++l) {
        edit(l, [&](Edits& e) { e.offload(PageList{list_}); });
        if (of.coded()) comes_back(l);
      }
    if (of.fetches())
      for (int l = 0; l < layers; ++l) edit(l, [&](Edits& e) { e.archive({}); });
  }

  void prepare() override {
    if (of_.step == Step::append) {
      if (grown_) {
        store_->advance(slots_[0], 1, true);
        for (int l = 0; l < layers_; ++l) evict(l);
      }
      grown_ = true;
    } else if (of_.step == Step::evict) {
      for (int l = 0; l < layers_; ++l) append(l, 1, store_->position(slots_[0]));
      store_->advance(slots_[0], 1, true);
    } else if (of_.moves_pages() && of_.step != Step::drop_and_recall) {
      // A page with a host copy has nothing to offload, and one on the device nothing to recall.
      const PageList pages{list_};
      for (int l = 0; l < layers_; ++l)
        edit(l, [&](Edits& e) {
          const bool offload = of_.step == Step::offload;
          e.drop(offload ? Tier::device : Tier::host, pages);
          offload ? e.recall(pages) : e.offload(pages);
          e.drop(offload ? Tier::host : Tier::device, pages);
        });
    }
  }

  void run(int layer) override {
    const PageList pages{list_};
    switch (of_.step) {
      case Step::append: append(layer, 1, store_->position(slots_[0])); break;
      case Step::evict: evict(layer); break;
      case Step::drop_and_recall:
        edit(layer, [&](Edits& e) {
          e.drop(Tier::device, pages);
          e.recall(pages);
        });
        break;
      case Step::offload: edit(layer, [&](Edits& e) { e.offload(pages); }); break;
      case Step::recall: edit(layer, [&](Edits& e) { e.recall(pages); }); break;
      case Step::fetch:
        edit(layer, [&](Edits& e) { e.fetch(TokenList{list_}, {}); });
        store_->settle();
        break;
    }
  }

  void check(Check& check) override {
    for (int again = 0; again < 3; ++again) {
      if (!of_.moves_pages()) prepare();
      Cache wanted = cache();
      if (of_.moves_pages()) prepare();  // takes away pages, which cannot be read then
      const std::int32_t came = store_->position(slots_[0]);
      for (int h = 0; h < of_.kv_heads; ++h) {
        if (of_.step == Step::evict)
          wanted.erase({h, store_->positions_by_place(0, slots_[0], h)[static_cast<std::size_t>(of_.tokens / 2)]});
        if (of_.step == Step::append) wanted[{h, came}] = new_token(h);
        for (int t = 1; of_.fetches() && t < of_.fetched(); t += 2)
          wanted.erase({h, t});  // tokens that are overwritten
      }
      run(0);
      if (of_.step == Step::offload) comes_back(0);
      check.that("every token has its position, key and value, and no other is there", same(cache(), wanted));
    }
    store_->check_invariants();
  }

 private:
  std::unique_ptr<Store> make_store() const {
    StoreOptions o;
    o.shape.layers = layers_;
    o.shape.query_heads = of_.kv_heads * of_.group;
    o.shape.kv_heads = of_.kv_heads;
    o.shape.head_dim = of_.dim;
    o.shape.page_size = of_.page_size;
    o.shape.max_slots = 1;
    o.shape.max_tokens = of_.tokens + !of_.moves_pages();
    o.shape.dtype = DType::bf16;
    o.host_codec = of_.host;
    o.archive = of_.fetches();
    if (of_.state) o.token_state = {"score"};
    if (place_.stream().device() == Device::cuda) return std::make_unique<CudaStore>(o, place_.stream());
    return std::make_unique<CpuStore>(o);
  }

  // Appends the first `count` of the rows that were put.
  void append(int layer, int count, int position) {
    Fit fit;
    if (CpuStore* cpu = store_->cpu())
      fit = cpu->append(layer, slots_[0], rows_, rows_, count, position);
    else
      fit = store_->cuda()->append(layer, slots_[0], rows_, rows_, DType::f32, std::int64_t{of_.kv_heads} * of_.dim,
                                   count, position);
    if (fit != Fit::ok) throw NoRoom("got no room for the tokens of a case");
  }
  template <class Make>
  void edit(int layer, const Make& make) {
    Edits edits(layer);
    make(edits);
    store_->apply(edits.all(), slots_);
  }
  // The host's copies take the place of the device's.
  void comes_back(int layer) {
    edit(layer, [&](Edits& e) {
      e.drop(Tier::device, PageList{list_});
      e.recall(PageList{list_});
    });
  }
  void evict(int layer) {
    edit(layer, [&](Edits& e) { e.evict_rest(TokenList{list_}); });
  }

  // Codes that were read become codes once more: a number moves by a step of 8 bits and a rounding to bf16 at most.
  bool same(const Cache& got, const Cache& wanted) const {
    if (!of_.coded()) return got == wanted;
    constexpr float range = 2;  // of the rows
    constexpr float most = range / 255 + range / 256;
    return std::equal(got.begin(), got.end(), wanted.begin(), wanted.end(), [&](const auto& a, const auto& b) {
      return a.first == b.first && std::equal(a.second.begin(), a.second.end(), b.second.begin(), b.second.end(),
                                              [&](float x, float y) { return std::fabs(x - y) <= most; });
    });
  }

  std::vector<float> new_token(int head) const {
    const auto row = place_.get(View<const float, 1>::dense(rows_ + head * of_.dim, {of_.dim}));
    std::vector<float> both;
    for (int side = 0; side < 2; ++side)
      for (const float x : row) both.push_back(stored(x, DType::bf16));
    return both;
  }
  Cache cache() {
    Cache all;
    Place here(place_.stream().device());  // memory until the end of the call
    const PagedKv kv = store_->view(0, slots_);
    const int tokens = store_->length(0, slots_[0], 0);
    std::size_t known = 0;  // numbers of a token that are there; a fetched token may be in two places
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      const std::array<std::int64_t, 4> extent{1, of_.kv_heads, tokens, of_.dim};
      const auto out = View<float, 4>::dense(
          here.take<float>(static_cast<std::size_t>(of_.kv_heads) * static_cast<std::size_t>(tokens * of_.dim)),
          extent);
      ops::read_rows({&kv, side}, out, place_.stream());
      const auto rows = place_.get(out);
      for (int h = 0; h < of_.kv_heads; ++h) {
        const auto position = store_->positions_by_place(0, slots_[0], h);
        for (int t = 0; t < tokens; ++t) {
          auto& to = all[{h, position[static_cast<std::size_t>(t)]}];
          const float* from = rows.data() + (std::int64_t{h} * tokens + t) * of_.dim;
          if (to.size() == known) to.insert(to.end(), from, from + of_.dim);
        }
      }
      known += static_cast<std::size_t>(of_.dim);
    }
    return all;
  }

  Place& place_;
  Copying of_;
  int layers_;
  std::unique_ptr<Store> store_;
  std::vector<std::int32_t> slots_;
  const float* rows_;
  IndexList list_;
  bool grown_ = false;
};

const char* name_of(Step s) {
  switch (s) {
    case Step::append: return "append";
    case Step::evict: return "evict";
    case Step::drop_and_recall: return "drop and recall";
    case Step::offload: return "offload";
    case Step::recall: return "recall";
    case Step::fetch: return "fetch";
  }
  return "?";
}

Case copying(const Copying& of, std::string shape) {
  Case c{"copy", std::move(shape)};
  c.make = [of](Place& place, int copies) { return std::make_unique<CopyScene>(place, of, copies); };
  c.prepared = of.step != Step::drop_and_recall && !of.fetches();
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  for (const Step step : {Step::append, Step::evict, Step::drop_and_recall, Step::offload, Step::recall, Step::fetch})
    for (const bool state : {false, true})
      for (const int tokens : {60, 65})
        v.push_back(copying({step, 2, 2, 16, 4, tokens, state},
                            fmt::format("{}, {} tokens{}", name_of(step), tokens, state ? ", state" : "")));

  for (const Step step : {Step::offload, Step::recall})
    v.push_back(copying({step, 2, 2, 16, 4, 60, false, CodecSpec{{8}, {8}}},
                        fmt::format("{}, 60 tokens, in k8v8 on the host", name_of(step))));

  // SmolLM2-135M's shape. A pass goes over its layers.
  constexpr int layers = 30;
  const auto on_cpu = [&](const Copying& of, std::string shape, double bytes) {
    v.push_back(copying(of, std::move(shape)));
    v.back().timed_cpu = true;
    v.back().work.bytes = bytes;
    v.back().copies = layers;
    v.back().runs = 200;
  };
  for (const bool state : {false, true}) {
    const char* suffix = state ? ", state" : "";
    const double token = 2. * 3 * 64 * 2;
    on_cpu({Step::append, 3, 3, 64, 16, 1024, state}, fmt::format("append 1 of 1024 tokens{}", suffix), token);
    on_cpu({Step::evict, 3, 3, 64, 16, 1024, state}, fmt::format("evict 1 of 1024 tokens{}", suffix),
           2 * token);  // read and written
  }
  const Copying pages{Step::drop_and_recall, 3, 3, 64, 16, 4096};
  on_cpu(pages, fmt::format("drop and recall {} pages a head", pages.pages()),
         2. * 2 * 2 * 3 * pages.pages() * 16 * 64);

  // One layer in Llama-3.1-8B's shape, over pinned memory.
  for (const int page_size : {8, 16, 32, 64})
    for (const auto& [step, host] : {std::pair{Step::recall, CodecSpec{}},
                                     {Step::offload, CodecSpec{}},
                                     {Step::recall, CodecSpec{{8}, {8}}},
                                     {Step::offload, CodecSpec{{8}, {8}}}}) {
      const Copying of{step, 8, 4, 128, page_size, 32768, false, host};
      if (of.coded() && page_size != 16 && page_size != 32) continue;
      const double unit = static_cast<double>(ops::make_layout(DType::bf16, host, page_size, of.dim, 0).bytes);
      const int moved = of.kv_heads * of.pages();
      v.push_back(copying(of, fmt::format("{} {} pages of {} tokens, {:.0f} B each{}", name_of(step), moved, page_size,
                                          unit, of.coded() ? " in k8v8 on the host" : "")));
      v.back().timed_cuda = true;
      v.back().work.bytes = unit * moved;
      v.back().work.copy = step == Step::recall ? Work::Copy::to_device : Work::Copy::to_host;
      v.back().kernel = "pinned memory";
      v.back().runs = 9;
    }
  // Rows of 256 bytes for a token's key and value.
  for (const int tokens : {2048, 32768}) {
    const Copying of{Step::fetch, 8, 4, 128, 16, tokens};
    const int moved = of.kv_heads * of.fetched();
    v.push_back(copying(of, fmt::format("fetch {} tokens of {} B each", moved, 2 * 2 * of.dim)));
    v.back().timed_cuda = true;
    v.back().work.bytes = 4. * of.dim * moved;
    v.back().work.copy = Work::Copy::to_device;
    v.back().kernel = "pinned memory";
    v.back().runs = 9;
  }
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
