// The work of a policy in a step: tokens that come, leave and move. Times are those of one layer. A pass goes over all
// 30 layers, so that caches hold no more of them than in a real step.
#include <fmt/format.h>
#include <kvlab/ops.hpp>

#include "bench/cases.hpp"
#include "bench/fixture.hpp"
#include "store/cpu_store.hpp"

namespace kvlab::bench {
namespace {

constexpr int tokens = 4096;

template <class F>
Line per_layer(const char* op, std::string shape, double bytes, const F& f) {
  const Times t = time_runs(10, [&] {
    for (int l = 0; l < layers; ++l) f(l);
  });
  Line line{op, std::move(shape), "", t.median / layers, t.best / layers};
  line.bytes = bytes;
  line.reads = true;
  return line;
}

struct ListBuffer {
  std::vector<std::int32_t> index, count;
  IndexList list;
  explicit ListBuffer(int room) : index(static_cast<std::size_t>(kv_heads * room)), count(kv_heads) {
    list.index = View<std::int32_t, 3>::dense(index.data(), {1, kv_heads, room});
    list.count = View<std::int32_t, 2>::dense(count.data(), {1, kv_heads});
  }
  // Lists [0, n) without [first, last).
  void fill(int n, int first, int last) {
    for (int h = 0; h < kv_heads; ++h) {
      list.count(0, h) = n - (last - first);
      for (int i = 0; i < list.count(0, h); ++i) list.index(0, h, i) = i < first ? i : i + last - first;
    }
  }
};

CpuStore make_store(int most, const std::vector<std::string>& columns) {
  StoreOptions o;
  o.shape.layers = layers;
  o.shape.query_heads = query_heads;
  o.shape.kv_heads = kv_heads;
  o.shape.head_dim = head_dim;
  o.shape.page_size = page_size;
  o.shape.max_slots = 1;
  o.shape.max_tokens = most;
  o.token_state = columns;
  return CpuStore(o);
}

void fill(CpuStore& store, int slot, int count) {
  const auto x = randoms(std::int64_t{count} * kv_heads * head_dim);
  for (int l = 0; l < layers; ++l) store.append(l, slot, x.data(), x.data(), count, 0);
  store.advance(slot, count, false);
}

// Measures a decode step of a policy that replaces one token per head: one comes, another leaves from the middle.
void replace_cases(int depth, const std::vector<std::string>& columns, std::vector<Line>& lines) {
  CpuStore store = make_store(depth + 1, columns);
  const int slot = store.open();
  const std::vector<std::int32_t> slots{slot};
  fill(store, slot, depth);
  const auto x = randoms(kv_heads * head_dim);
  ListBuffer kept(depth + 1);
  kept.fill(depth + 1, depth / 2, depth / 2 + 1);
  std::vector<double> came, left;
  using Clock = std::chrono::steady_clock;
  const auto lap = [](Clock::time_point& since) {
    const auto begin = since;
    since = Clock::now();
    return std::chrono::duration<double>(since - begin).count() / layers;
  };
  for (int i = 0; i < 200; ++i) {
    auto since = Clock::now();
    for (int l = 0; l < layers; ++l) store.append(l, slot, x.data(), x.data(), 1, store.position(slot));
    came.push_back(lap(since));
    store.advance(slot, 1, true);
    lap(since);
    for (int l = 0; l < layers; ++l) {
      Edits edits(l);
      edits.evict_rest(TokenList{kept.list});
      store.apply(edits.all(), slots);
    }
    left.push_back(lap(since));
  }
  const double token = 2. * kv_heads * head_dim * 2;
  const auto add = [&](const char* what, std::vector<double>& t, double bytes) {
    std::sort(t.begin(), t.end());
    Line l{"copy", fmt::format("{} 1 of {} tokens{}", what, depth, columns.empty() ? "" : ", state"), "",
           t[t.size() / 2], t.front()};
    l.bytes = bytes;
    l.reads = true;
    lines.push_back(l);
  };
  add("append", came, token);
  add("evict", left, 2 * token);  // read and written
}

}  // namespace

std::vector<Line> copy_cases() {
  std::vector<Line> lines;
  replace_cases(1024, {}, lines);
  replace_cases(1024, {"score"}, lines);
  CpuStore store = make_store(tokens, {});
  const int slot = store.open();
  const std::vector<std::int32_t> slots{slot};
  fill(store, slot, tokens);
  // Offloads every other page, as a budget of resident pages would.
  constexpr int recalled = tokens / page_size / 2;
  ListBuffer pages(recalled);
  pages.fill(recalled, 0, 0);
  for (auto& page : pages.index) page *= 2;
  for (int l = 0; l < layers; ++l) {
    Edits edits(l);
    edits.offload(PageList{pages.list});
    store.apply(edits.all(), slots);
  }
  lines.push_back(per_layer("copy", fmt::format("drop and recall {} pages a head", recalled),
                            2. * 2 * 2 * kv_heads * recalled * page_size * head_dim, [&](int l) {
                              Edits edits(l);
                              edits.drop(Tier::device, PageList{pages.list});
                              edits.recall(PageList{pages.list});
                              store.apply(edits.all(), slots);
                            }));
  return lines;
}

}  // namespace kvlab::bench
