// The plan of a prompt's store_as edit: where each head's tokens go, and which frames its pages take. Copies, and
// frames that are given back, are no part of it. A GPU's kernels plan it, or the CPU's threads
// (Needs::planned_on_host).
#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "base/device_op.hpp"
#include "cases/case.hpp"
#include "ops/page/paged.hpp"
#include "store/host_plan.hpp"

namespace kvlab::cases {
namespace {

using Ints = std::vector<std::int32_t>;
constexpr int page_size = 16;

enum class By {
  device,    // kernels on a GPU
  host,      // threads; all numbers are the host's
  crossing,  // threads; levels come from the device and the plan goes there
};

struct Compaction {
  By by;
  int rows, kv_heads, tokens;  // rows: sequences of all layers
  bool ragged = false;         // heads of any length, of which some stay as they are and some keep nothing
  int heads() const { return rows * kv_heads; }
  int pages() const { return (tokens + page_size - 1) / page_size; }
};

// A third of the tokens is high, a third low, a third leaves. The circular lists of free frames start at their ends.
class CompactionScene final : public Scene {
 public:
  CompactionScene(Place& place, const Compaction& of)
      : place_(place),
        of_(of),
        levels_(n(of.heads()) * n(of.tokens)),
        slots_(n(of.rows)),
        lengths_(n(of.heads()), of.tokens),
        lower_(n(of.heads())),
        fresh_(n(of.heads()) * n(of.pages())),
        begins_(n(of.heads()) * n((of.tokens + CudaStoreLevels::chunk - 1) / CudaStoreLevels::chunk)),
        plans_(n(of.heads())) {
    std::mt19937 rng(1);
    constexpr std::uint8_t kinds[] = {0, 1, level_gone};
    for (std::uint8_t& level : levels_) level = kinds[rng() % 3];
    for (int i = 0; of.ragged && i < of.heads(); ++i) {
      const auto kind = rng() % 8;
      lengths_[n(i)] = static_cast<std::int32_t>(rng() % n(of.tokens + 1));
      lower_[n(i)] = lengths_[n(i)] / page_size * static_cast<int>(rng() % 3) / 2;
      std::uint8_t* level = levels_.data() + std::int64_t{i} * of.tokens;
      const int low = lower_[n(i)] * page_size;
      if (kind == 0) std::fill_n(std::fill_n(level, low, std::uint8_t{1}), of.tokens - low, std::uint8_t{0});
      if (kind == 1) std::fill_n(level, of.tokens, level_gone);
      if (kind == 2) std::fill_n(level, of.tokens, std::uint8_t{1});
    }
    for (int r = 0; r < of.rows; ++r) slots_[n(r)] = r;
    const auto frames = static_cast<std::int32_t>(fresh_.size());
    for (const CudaPool pool : {device_pool, lower_pool}) {
      for (std::int32_t i = 0; i < frames; ++i) free_[pool].push_back(frames - 1 - i);
      counters_.taken[pool] = frames - 1;
      counters_.frames[pool] = frames, counters_.given[pool] = counters_.taken[pool] + frames;
    }
    here_.layout = ops::make_layout(DType::bf16, {{8}, {4}}, page_size, 128, 0);
    here_.kv_heads = of.kv_heads, here_.pages = of.pages();
    here_.length = lengths_.data(), here_.lower_pages = lower_.data();
    for (const CudaPool pool : {device_pool, lower_pool})
      here_.pool[pool] = {free_[pool].data(), &own_counters_.taken[pool], &own_counters_.given[pool], frames};
    here_.counters = &own_counters_;
    here_edit_.slots = slots_.data(), here_edit_.rows = of.rows, here_edit_.most = of.tokens;
    here_edit_.levels = View<const std::uint8_t, 3>::dense(levels_.data(), {of.rows, of.kv_heads, of.tokens});
    here_edit_.begins = begins_.data(), here_edit_.fresh = fresh_.data(), here_edit_.plans = plans_.data();
    if (of.by == By::host) return;
    there_ = here_, there_edit_ = here_edit_;
    there_.length = place.put(lengths_), there_.lower_pages = place.put(lower_);
    there_.counters = place.put(&counters_, 1);
    for (const CudaPool pool : {device_pool, lower_pool})
      there_.pool[pool] = {place.put(free_[pool]), &there_.counters->taken[pool], &there_.counters->given[pool],
                           frames};
    there_edit_.slots = place.put(slots_);
    there_edit_.levels = place.put(here_edit_.levels);
    there_edit_.begins = place.put(begins_), there_edit_.fresh = place.put(fresh_),
    there_edit_.plans = place.put(plans_);
  }

  void prepare() override {
    own_counters_ = counters_;
    if (of_.by != By::host) copy(there_.counters, &counters_, 1);
    place_.synchronize();
  }
  void run(int) override {
    if (of_.by == By::device) return only_on_cuda<cuda_store::plan_levels>(there_, there_edit_, place_.stream());
    if (of_.by == By::crossing) {
      copy(levels_.data(), there_edit_.levels.data, levels_.size());
      place_.synchronize();
    }
    host_plan::levels(here_, here_edit_);
    if (of_.by == By::host) return;
    copy(there_edit_.begins, begins_.data(), begins_.size());
    copy(there_edit_.fresh, fresh_.data(), fresh_.size());
    copy(there_edit_.plans, plans_.data(), plans_.size());
    copy(there_.counters, &own_counters_, 1);
    place_.synchronize();
  }
  void check(Check& check) override {
    prepare();
    run(0);
    if (of_.by != By::host) {
      copy(begins_.data(), there_edit_.begins, begins_.size());
      copy(fresh_.data(), there_edit_.fresh, fresh_.size());
      copy(plans_.data(), there_edit_.plans, plans_.size());
      copy(&own_counters_, there_.counters, 1);
      place_.synchronize();
    }
    check.that("no error", own_counters_.error == 0);
    std::vector<int> taken[pools];
    for (const CudaPool pool : {device_pool, lower_pool}) taken[pool].resize(free_[pool].size());
    bool equal = true, pages_are = true;
    for (int of = 0; of < of_.heads(); ++of) {
      const Ints wanted = plain_order(of);
      const CudaStoreLevels::Plan& plan = plans_[n(of)];
      const int kept = static_cast<int>(wanted.size()), low = low_of(of);
      if (kept == lengths_[n(of)] && low == lower_[n(of)] * page_size && std::is_sorted(wanted.begin(), wanted.end()))
        equal = equal && plan.kept == -1;  // all stays as it is
      else
        equal = equal && plan.kept == kept && plan.low == low && wanted == order_by(plan, of);
      for (int page = 0; page * page_size < plan.kept; ++page) {
        const PageEntry& e = fresh_[n(of) * n(of_.pages()) + n(page)];
        const bool lower = page * page_size < plan.low;
        pages_are = pages_are && e.codec == lower && e.tokens == std::min(page_size, plan.kept - page * page_size) &&
                    ++taken[lower ? lower_pool : device_pool][n(e.frame)] == 1;
      }
    }
    check.that("tokens go where plain loops bring them", equal);
    check.that("pages have their codecs and tokens, and no frame is taken twice", pages_are);
    for (const CudaPool pool : {device_pool, lower_pool}) {
      const auto used = std::count(taken[pool].begin(), taken[pool].end(), 1);
      check.that("the pool lacks what is taken", own_counters_.free(pool) == counters_.free(pool) - used);
    }
  }

 private:
  static std::size_t n(int x) { return static_cast<std::size_t>(x); }
  template <class T>
  void copy(T* to, const T* from, std::size_t count) const {
    copy_memory(to, from, count * sizeof(T), place_.stream());
  }
  int low_of(int of) const {
    const auto begin = levels_.begin() + std::int64_t{of} * of_.tokens;
    return static_cast<int>(std::count(begin, begin + lengths_[n(of)], std::uint8_t{1})) / page_size * page_size;
  }
  // The tokens by their places, as those find them who count on from where a chunk begins.
  Ints order_by(const CudaStoreLevels::Plan& plan, int of) const {
    const std::uint8_t* level = levels_.data() + std::int64_t{of} * of_.tokens;
    Ints order(n(plan.kept), -1);
    CudaStoreLevels::Begin at;
    for (int t = 0; t < lengths_[n(of)]; ++t) {
      if (t % CudaStoreLevels::chunk == 0) at = begins_[n(of) * n(here_edit_.chunks()) + n(t / CudaStoreLevels::chunk)];
      const int place = plan.place(level[t] == 1, at.lows, at.others);
      if (level[t] != level_gone && place >= 0 && place < plan.kept) order[n(place)] = t;
      at.lows += level[t] == 1, at.others += level[t] == 0;
    }
    return order;
  }
  Ints plain_order(int of) const {
    const std::uint8_t* level = levels_.data() + std::int64_t{of} * of_.tokens;
    Ints low, rest;
    const int most = low_of(of);
    for (int t = 0; t < lengths_[n(of)]; ++t)
      if (level[t] == 1 && static_cast<int>(low.size()) < most)
        low.push_back(t);
      else if (level[t] != level_gone)
        rest.push_back(t);
    low.insert(low.end(), rest.begin(), rest.end());
    return low;
  }

  Place& place_;
  Compaction of_;
  std::vector<std::uint8_t> levels_;
  Ints slots_, lengths_, lower_, free_[pools];
  std::vector<PageEntry> fresh_;
  std::vector<CudaStoreLevels::Begin> begins_;
  std::vector<CudaStoreLevels::Plan> plans_;
  CudaStoreCounters counters_, own_counters_;  // at the start, and of a run
  CudaStoreLayer here_, there_;
  CudaStoreLevels here_edit_, there_edit_;
};

Case compaction(const Compaction& of, const std::string& shape) {
  constexpr const char* by[] = {"kernel", "host's threads", "threads, crossing"};
  Case c{"compaction", shape};
  c.kernel = by[static_cast<int>(of.by)];
  c.make = [of](Place& place, int) { return std::make_unique<CompactionScene>(place, of); };
  c.prepared = true;
  c.cpu = of.by == By::host;
  // Levels and free frames are read. The pages of the two thirds that stay are written.
  c.work.bytes = of.heads() * (of.tokens + 2. / 3 * of.pages() * (sizeof(PageEntry) + sizeof(std::int32_t)));
  return c;
}

std::vector<Case> list() {
  std::vector<Case> v;
  for (const By by : {By::device, By::host, By::crossing}) {
    for (const int tokens : {1, 200, 333}) {
      v.push_back(compaction({by, 5, 3, tokens}, fmt::format("plan of levels, 15 heads of {} tokens", tokens)));
      v.push_back(
          compaction({by, 13, 3, tokens, true}, fmt::format("plan of levels, 39 heads of up to {} tokens", tokens)));
    }
    // Heads that the warps of a block share.
    for (const int tokens : {5000, 9333})
      v.push_back(
          compaction({by, 3, 5, tokens, true}, fmt::format("plan of levels, 15 heads of up to {} tokens", tokens)));
    // As LeanKV's paper plans: 128 sequences of 1K tokens, here of all 32 layers of Llama-3.1-8B in one launch. The
    // store plans a layer at a time.
    v.push_back(compaction({by, 32 * 128, 8, 1024}, "plan of levels, 32 layers in a launch, 128 x 8 heads of 1024"));
    v.back().timed_cuda = true;
    v.back().timed_cpu = by == By::host;
    v.back().runs = 9;
  }
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
