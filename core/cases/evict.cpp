// A decode step's eviction: each head got a token and loses the lowest one.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include <algorithm>

#include "cases/case.hpp"
#include "cases/numbers.hpp"
#include "cases/paged_fixture.hpp"
#include "store/cpu_store.hpp"
#include "store/cuda_store.hpp"

namespace kvlab::cases {
namespace {

enum class By { age, score, column };

struct Evicting {
  By by;
  int rows, kv_heads, dim, page_size, keep;
  Pins pins;
  bool joined = false;  // as a graph's step: on a GPU all layers evict in one launch
};

class EvictScene final : public Scene {
 public:
  // Copy i is layer i.
  EvictScene(Place& place, const Evicting& of, int layers)
      : place_(place),
        of_(of),
        layers_(layers),
        store_(make_store()),
        token_(place.put(randoms(std::int64_t{of.keep} * of.kv_heads * of.dim))),
        scores_(randoms(std::int64_t{of.rows} * of.kv_heads * (of.keep + 1))),
        pins_(static_cast<std::size_t>(of.rows), of.pins) {
    for (int r = 0; r < of.rows; ++r) {
      slots_.push_back(store_->open());
      for (int l = 0; l < layers; ++l) append(l, slots_.back(), of.keep, 0);
      store_->advance(slots_.back(), of.keep, false);
    }
    const auto amount = std::vector<std::int32_t>(static_cast<std::size_t>(of.rows * of.kv_heads), of.keep);
    surplus_.keep = View<const std::int32_t, 2>::dense(place.put(amount), {of.rows, of.kv_heads});
    surplus_.pins = place.put(pins_);
    const auto there = place.put(scores());
    if (of.by == By::score) surplus_.scores = there;
    if (of.by == By::column) {
      surplus_.column = 0;
      for (int l = 0; l < layers; ++l) {
        const PagedKv kv = store_->view(l, slots_);
        ops::blend_state({&kv, 0}, 0, there, 1, place.stream());
      }
    }
  }

  void prepare() override {
    for (const int slot : slots_) {
      for (int l = 0; l < layers_; ++l) append(l, slot, 1, store_->position(slot));
      store_->advance(slot, 1, true);
    }
  }
  void run(int layer) override {
    if (of_.joined && layer == 0) store_->in_graph(true);
    Edits edits(layer);
    edits.evict_surplus(surplus_);
    store_->apply(edits.all(), slots_, nullptr, of_.joined);
    if (!of_.joined || layer + 1 < layers_) return;
    store_->end_layers();
    store_->in_graph(false);
  }
  void check(Check& check) override {
    for (int step = 0; step < 3; ++step) {
      prepare();
      std::vector<std::vector<std::int32_t>> before;
      for (int head = 0; head < of_.rows * of_.kv_heads; ++head) before.push_back(positions(head));
      const std::vector<float> state = of_.by == By::column ? states() : std::vector<float>();
      for (int l = 0; l < layers_; ++l) run(l);
      for (int head = 0; head < of_.rows * of_.kv_heads; ++head) {
        auto wanted = before[static_cast<std::size_t>(head)];
        const std::size_t n = wanted.size();
        const float* of_head = (of_.by == By::column ? state : scores_).data() + n * static_cast<std::size_t>(head);
        wanted[lowest(wanted, of_head)] = wanted.back();
        wanted.pop_back();
        for (int l = 0; l < layers_; ++l)
          check.equal(fmt::format("positions of head {} of layer {} after step {}", head, l, step), positions(head, l),
                      wanted);
      }
    }
    store_->check_invariants();
  }

 private:
  std::unique_ptr<Store> make_store() const {
    StoreOptions o;
    o.shape.layers = layers_;
    o.shape.query_heads = o.shape.kv_heads = of_.kv_heads;
    o.shape.head_dim = of_.dim;
    o.shape.page_size = of_.page_size;
    o.shape.max_slots = of_.rows;
    o.shape.max_tokens = of_.keep + 1;
    o.shape.dtype = DType::bf16;
    if (of_.by == By::column) o.token_state = {"score"};
    if (place_.stream().device() == Device::cuda) return std::make_unique<CudaStore>(o, place_.stream());
    return std::make_unique<CpuStore>(o);
  }
  void append(int layer, int slot, int count, int position) {
    Fit fit;
    if (CpuStore* cpu = store_->cpu())
      fit = cpu->append(layer, slot, token_, token_, count, position);
    else
      fit = store_->cuda()->append(layer, slot, token_, token_, DType::f32, std::int64_t{of_.kv_heads} * of_.dim, count,
                                   position);
    if (fit != Fit::ok) throw NoRoom("got no room for the tokens of a case");
  }
  View<const float, 3> scores() const {
    return View<const float, 3>::dense(scores_.data(), {of_.rows, of_.kv_heads, of_.keep + 1});
  }
  std::vector<std::int32_t> positions(int head, int layer = 0) const {
    return store_->positions_by_place(layer, slots_[static_cast<std::size_t>(head / of_.kv_heads)],
                                      head % of_.kv_heads);
  }
  std::vector<float> states() {
    Place here(place_.stream().device());  // memory until the end of the call
    const PagedKv kv = store_->view(0, slots_);
    const auto out = here.unwritten(std::array<std::int64_t, 3>{of_.rows, of_.kv_heads, of_.keep + 1});
    ops::read_state({&kv, 0}, out, place_.stream());
    place_.synchronize();
    return here.get(out);
  }
  // Returns the place of the lowest token that is not pinned.
  std::size_t lowest(const std::vector<std::int32_t>& position, const float* score) const {
    auto sorted = position;
    std::sort(sorted.begin(), sorted.end());
    const auto rank = [&](std::size_t t) { return of_.by == By::age ? static_cast<float>(position[t]) : score[t]; };
    std::size_t worst = position.size();
    for (std::size_t t = 0; t < position.size(); ++t) {
      const auto age = std::lower_bound(sorted.begin(), sorted.end(), position[t]) - sorted.begin();
      if (age < of_.pins.first || age >= std::ssize(sorted) - of_.pins.last) continue;
      if (worst == position.size() || rank(t) <= rank(worst)) worst = t;
    }
    return worst;
  }

  Place& place_;
  Evicting of_;
  int layers_;
  std::unique_ptr<Store> store_;
  std::vector<std::int32_t> slots_;
  const float* token_;
  std::vector<float> scores_;
  std::vector<Pins> pins_;
  Surplus surplus_;
};

Case evicting(const Evicting& of) {
  const char* by = of.by == By::age ? "age" : of.by == By::score ? "score" : "column";
  Case c{"evict", fmt::format("1 of {} tokens by {}, {} heads{}", of.keep + 1, by, of.rows * of.kv_heads,
                              of.joined ? ", all layers in a launch" : "")};
  c.make = [of](Place& place, int copies) {
    return std::make_unique<EvictScene>(place, of, of.joined ? std::max(copies, 3) : copies);
  };
  c.prepared = c.in_graph = true;
  // Positions, and scores or states.
  c.work.bytes = 4. * of.rows * of.kv_heads * (of.keep + 1) * (of.by == By::age ? 1 : 2);
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  for (const By by : {By::age, By::score, By::column})
    for (const int keep : {63, 64, 70}) v.push_back(evicting({by, 2, 3, 16, 8, keep, {3, 20}}));
  for (const By by : {By::age, By::column}) v.push_back(evicting({by, 2, 3, 16, 8, 70, {3, 20}, true}));
  // The layers of Llama-3.1-8B, more than a GPU's cache holds. A line has the time of one layer. Only evictions by
  // score have a launch for each layer in a step.
  for (const bool joined : {false, true})
    for (const int rows : {1, 8})
      for (const By by : {By::age, By::score, By::column}) {
        if (joined && by == By::score) continue;
        v.push_back(evicting({by, rows, 8, 128, 16, 2048, by == By::age ? Pins{4, 2044} : Pins{0, 1024}, joined}));
        v.back().timed_cuda = true;
        v.back().copies = 32;
      }
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
