// What a decode step changes in a cache of two codecs, in all layers: tokens become low, tokens leave, and pages of low
// tokens get full. Each head has got a token before.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "cases/case.hpp"
#include "cases/paged_fixture.hpp"
#include "ops/page/reference.hpp"
#include "store/cpu_store.hpp"
#include "store/cuda_store.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;
constexpr CodecSpec high{{8}, {4}}, low{{4}, {2}};
std::size_t n(int x) { return static_cast<std::size_t>(x); }

struct Stepping {
  int layers, rows, kv_heads, dim, page_size, tokens;
  int low_pages;         // of a head at the start
  bool columns = false;  // two columns of token state in place of one
  Summary summary = Summary::none;

  int heads() const { return layers * rows * kv_heads; }
  double token_bytes(const CodecSpec& codec) const {
    return static_cast<double>(ops::make_layout(DType::bf16, codec, page_size, dim, columns ? 2 : 1).bytes) / page_size;
  }
};

// What happens in 16 heads: 8 have a token that becomes low, and of one of these a page is full then. 2 lose a token, 2
// lose one for another that becomes low, 4 stay as they are. From step to step these are other heads. A cache that
// keeps three tokens of four, two of them low, has such steps, with half as many full pages.
struct Change {
  bool moves, leaves, lowers;
  static Change of(int head, int step) {
    const int kind = (5 * head + 3 * step) % 16;
    return {kind < 10, kind >= 8 && kind < 12, kind == 0};
  }
};

// Sequences of a store, and their next step.
class Sequences {
 public:
  static constexpr int most_steps = 32, spare_rows = 64;

  // rows: their numbers. Sequences of one number are alike in all stores.
  Sequences(Place& place, const Stepping& of, Ints rows)
      : place_(place),
        of_(of),
        rows_(std::move(rows)),
        numbers_(randoms(std::int64_t{of.tokens + most_steps + spare_rows + 1} * of.kv_heads * of.dim)),
        there_(place.put(numbers_)),
        length_(heads(), of.tokens),
        low_pages_(heads(), of.low_pages) {
    StoreOptions o;
    o.shape.layers = of.layers;
    o.shape.query_heads = o.shape.kv_heads = of.kv_heads;
    o.shape.head_dim = of.dim;
    o.shape.page_size = of.page_size;
    o.shape.max_slots = static_cast<int>(rows_.size());
    o.shape.max_tokens = of.tokens + most_steps;
    o.shape.dtype = DType::bf16;
    o.codecs = {high, low};
    o.host_codec = high;
    o.token_state = {"significance"};
    if (of.columns) o.token_state.push_back("another");
    o.summary = of.summary;
    o.all_layers = true;
    if (place.stream().device() == Device::cuda)
      store_ = std::make_unique<CudaStore>(o, place.stream());
    else
      store_ = std::make_unique<CpuStore>(o);
    for (std::size_t r = 0; r < rows_.size(); ++r) slots_.push_back(store_->open());
    append(of.tokens, false);
    ListMemory memory;
    const IndexList first = memory.empty({std::ssize(rows_), of.kv_heads, of.low_pages});
    std::fill(memory.count.begin(), memory.count.end(), of.low_pages);
    for (std::size_t i = 0; i < memory.index.size(); ++i) memory.index[i] = static_cast<int>(i) % of.low_pages;
    const IndexList list = place.put(first);
    for (int layer = 0; layer < of.layers; ++layer) {
      Edits edits(layer);
      edits.encode(PageList{list}, 1);
      carry_out(edits);
    }
    for (int i = 0; i < 3; ++i)
      lists_[i] = place.put(host_[i].empty({of.layers * std::ssize(rows_), of.kv_heads, widths[i]}));
  }

  Store& store() const { return *store_; }
  const Ints& slots() const { return slots_; }
  const Ints& rows() const { return rows_; }

  // Appends a token to every head and says what changes then.
  void prepare() {
    append(1, true);
    for (int layer = 0, i = 0; layer < of_.layers; ++layer)
      for (const std::int32_t row : rows_)
        for (int head = 0; head < of_.kv_heads; ++head, ++i)
          choose((layer * of_.rows + row) * of_.kv_heads + head, n(i));
    ++step_;
    for (int i = 0; i < 3; ++i) {
      copy_memory(lists_[i].index.data, host_[i].index.data(), host_[i].index.size() * sizeof(std::int32_t), stream());
      copy_memory(lists_[i].count.data, host_[i].count.data(), host_[i].count.size() * sizeof(std::int32_t), stream());
    }
    if (CudaStore* cuda = store_->cuda()) {
      CudaStore::Taken most;
      most.frames[lower_pool] = std::ssize(length_);
      if (!cuda->reserve_step(slots_, most)) throw NoRoom("got no room for the pages of a case");
      cuda->count_edits_anew();
    }
    place_.synchronize();
  }
  void run() {
    Edits edits;
    edits.for_all_layers();
    edits.move(TokenList{lists_[0]});
    edits.evict(TokenList{lists_[1]});
    edits.encode(PageList{lists_[2]}, 1);
    CudaStore* cuda = store_->cuda();
    if (cuda) cuda->reserved(true);  // as in a step that a graph holds
    carry_out(edits);
    if (cuda) cuda->reserved(false);
  }
  // The step's lists of head i of these sequences, by layers.
  const std::int32_t* list(int which, std::size_t i) const { return &host_[which].index[i * n(widths[which])]; }
  int count(int which, std::size_t i) const { return host_[which].count[i]; }

 private:
  static constexpr int widths[] = {2, 1, 1};  // pairs, tokens that leave, full pages

  std::size_t heads() const { return n(of_.layers) * rows_.size() * n(of_.kv_heads); }
  Stream stream() const { return place_.stream(); }
  void carry_out(const Edits& edits) {
    if (store_->apply(edits.all(), slots_).fit != Fit::ok) throw NoRoom("got no room for the pages of a case");
  }
  void append(int count, bool decode) {
    const std::int64_t stride = std::int64_t{of_.kv_heads} * of_.dim;
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      const int slot = slots_[r], first = store_->position(slot);
      for (int layer = 0; layer < of_.layers; ++layer) {
        const float* k = there_ + (first + (rows_[r] + 7 * layer) % spare_rows) * stride;
        const float* v = k + stride;
        CpuStore* cpu = store_->cpu();
        const Fit fit = cpu ? cpu->append(layer, slot, k, v, count, first)
                            : store_->cuda()->append(layer, slot, k, v, DType::f32, stride, count, first);
        if (fit != Fit::ok) throw NoRoom("got no room for the tokens of a case");
      }
      store_->advance(slot, count, decode);
    }
    for (std::int32_t& length : length_) length += decode ? count : 0;
  }
  // head: its number in all stores; i: here.
  void choose(int head, std::size_t i) {
    const Change change = Change::of(head, step_);
    std::mt19937 rng(static_cast<unsigned>(head * most_steps + step_));
    const auto below = [&](int end) { return static_cast<int>(rng() % static_cast<unsigned>(end)); };
    const int p = of_.page_size, low_tokens = low_pages_[i] * p,
              falls = low_tokens + p + below(length_[i] - low_tokens - p);
    std::int32_t* pair = &host_[0].index[2 * i];
    pair[0] = falls, pair[1] = change.leaves ? below(low_tokens) : low_tokens + step_ % p;
    host_[1].index[i] = falls, host_[2].index[i] = low_pages_[i];
    host_[0].count[i] = change.moves ? 2 : 0, host_[1].count[i] = change.leaves, host_[2].count[i] = change.lowers;
    length_[i] -= change.leaves, low_pages_[i] += change.lowers;
  }

  Place& place_;
  Stepping of_;
  Ints rows_, slots_;
  std::vector<float> numbers_;
  const float* there_;
  std::unique_ptr<Store> store_;
  Ints length_, low_pages_;  // [layer, row, kv_head], as the steps so far leave them
  ListMemory host_[3];
  IndexList lists_[3];
  int step_ = 0;
};

class StepScene final : public Scene {
 public:
  StepScene(Place& place, const Stepping& of, bool timed)
      : place_(place), of_(of), all_(place, of, numbers_to(of.rows)), cold_bytes_(timed ? 256u << 20 : 0) {
    if (timed) cold_ = place.take<std::byte>(cold_bytes_);
  }
  void prepare() override {
    all_.prepare();
    if (cold_) zero_memory(cold_, cold_bytes_, place_.stream());  // no cache holds the pages
    place_.synchronize();
  }
  void run(int) override { all_.run(); }

  // Some sequences, against plain lists of positions, and against the same ones in a cache on the CPU.
  void check(Check& check) override {
    Ints some{0, of_.rows / 2, of_.rows - 1};
    some.erase(std::unique(some.begin(), some.end()), some.end());
    OnHost host;
    Sequences here(host, of_, some);
    std::vector<Ints> wanted(n(of_.layers) * some.size() * n(of_.kv_heads), numbers_to(of_.tokens));
    for (int step = 0; step < 3; ++step) {
      all_.prepare(), here.prepare();
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        wanted[i].push_back(of_.tokens + step);
        if (here.count(0, i)) std::swap(wanted[i][n(here.list(0, i)[0])], wanted[i][n(here.list(0, i)[1])]);
        if (here.count(1, i)) wanted[i][n(*here.list(1, i))] = wanted[i].back(), wanted[i].pop_back();
      }
      all_.run(), here.run();
    }
    for (std::size_t r = 0; r < some.size(); ++r) {
      const Ints slots{here.slots()[r]};
      const int there = all_.slots()[n(some[r])];
      std::shared_ptr<CpuStore> copy;
      if (CudaStore* cuda = all_.store().cuda()) copy = cuda->copy_of(there);
      const Ints of_copy{copy ? 0 : there};
      for (int layer = 0; layer < of_.layers; ++layer) {
        const PagedKv kv = (copy ? copy.get() : all_.store().cpu())->view(layer, of_copy),
                      mine = here.store().cpu()->view(layer, slots);
        for (int head = 0; head < of_.kv_heads; ++head) {
          const auto scope = check.in(fmt::format("sequence {}, layer {}, head {}", some[r], layer, head));
          const std::size_t i = (n(layer) * some.size() + r) * n(of_.kv_heads) + n(head);
          check.equal("positions", all_.store().positions_by_place(layer, there, head), wanted[i]);
          check.that("as many pages of the second codec as on the CPU",
                     kv.lower_pages(kv.slots[0], head) == mine.lower_pages(slots[0], head));
          for (const KvSide side : {KvSide::key, KvSide::value}) {
            std::vector<float> got(wanted[i].size() * n(of_.dim)), own(got.size());
            const int tokens = static_cast<int>(wanted[i].size());
            if (kv.tokens(0, head) != tokens || mine.tokens(0, head) != tokens) continue;
            ops::gather_rows_reference(kv, 0, head, side, tokens, got.data());
            ops::gather_rows_reference(mine, 0, head, side, tokens, own.data());
            check.equal(side == KvSide::key ? "keys" : "values", got, own, 0);
          }
        }
      }
    }
    all_.store().check_invariants();
  }

 private:
  static Ints numbers_to(int end) {
    Ints all(n(end));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  Place& place_;
  Stepping of_;
  Sequences all_;
  std::size_t cold_bytes_;
  std::byte* cold_ = nullptr;
};

Case stepping(const Stepping& of, const std::string& shape, bool timed = false) {
  Case c{"compaction", shape};
  c.kernel = "kernel";
  c.make = [of, timed](Place& place, int) { return std::make_unique<StepScene>(place, of, timed); };
  c.prepared = c.in_graph = true;
  c.timed_cuda = timed;
  c.runs = 15;
  c.work.copy = Work::Copy::in_memory;
  // Tokens and pages are read and written. Heads have lists, lengths and four entries of pages.
  const double h = of.token_bytes(high), l = of.token_bytes(low);
  c.work.bytes = of.heads() * ((8 * 4 * h + 2 * 2 * h + 2 * (3 * h + l) + of.page_size * (h + l)) / 16 + 10 * 4 +
                               4 * sizeof(PageEntry));
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  for (const auto& [dim, page_size] : {std::pair{32, 8}, {80, 8}, {128, 16}, {256, 8}})
    v.push_back(stepping({2, 3, 3, dim, page_size, 5 * page_size, 1},
                         fmt::format("a step, 18 heads of {}, pages of {}", dim, page_size)));
  v.push_back(stepping({1, 2, 16, 64, 40, 163, 2, true}, "a step, 32 heads of 64, pages of 40, two columns"));
  v.push_back(stepping({2, 1, 9, 32, 8, 63, 3, false, Summary::min_max}, "a step, 18 heads of 32, summaries"));
  v.push_back(stepping({32, 128, 8, 128, 16, 1024, 16}, "a step, 32 layers, 128 x 8 heads of 1024", true));
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
