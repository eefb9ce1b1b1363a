// The same edits must leave the same tokens, order, tiers, summaries and ledger in both stores.
#include "store/cuda_store.hpp"

#include <array>
#include <catch2/catch.hpp>
#include <functional>
#include <kvlab/clusters.hpp>
#include <kvlab/error.hpp>
#include <kvlab/kinds.hpp>
#include <kvlab/ops.hpp>
#include <limits>
#include <memory>
#include <optional>
#include <random>

#include "base/backend.hpp"
#include "base/put_off.hpp"
#include "cases/place.hpp"
#include "cases/quick.hpp"
#include "ops/score/verify.hpp"
#include "ops/select/chosen_pages.hpp"
#include "store/unused.hpp"
#include "support/joined_launches.hpp"
#include "support/store_fixture.hpp"

using namespace kvlab;
using cases::OnDevice;
using test::StoreFixture;

namespace {

// Lists of several rows on the host and on the device.
struct BothLists {
  std::vector<std::int32_t> index, count;
  IndexList host, device;

  // [row][kv_head] -> places
  BothLists(const std::vector<test::PerHead>& rows, OnDevice& memory) {
    std::size_t room = 1;
    for (const auto& row : rows)
      for (const auto& l : row) room = std::max(room, l.size());
    const std::size_t heads = rows[0].size();
    index.assign(rows.size() * heads * room, -5);
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (std::size_t h = 0; h < heads; ++h) {
        std::copy(rows[r][h].begin(), rows[r][h].end(),
                  index.begin() + static_cast<std::ptrdiff_t>((r * heads + h) * room));
        count.push_back(static_cast<std::int32_t>(rows[r][h].size()));
      }
    const std::int64_t n = static_cast<std::int64_t>(rows.size()), k = static_cast<std::int64_t>(heads);
    host.index = View<std::int32_t, 3>::dense(index.data(), {n, k, static_cast<std::int64_t>(room)});
    host.count = View<std::int32_t, 2>::dense(count.data(), {n, k});
    device = memory.put(host);
  }
  BothLists(const BothLists&) = delete;
};

class Both {
 public:
  Both(const StoreFixture& fixture, unsigned seed)
      : f(fixture),
        heads(f.options.shape.kv_heads),
        dim(f.options.shape.head_dim),
        cpu(f.options),
        cuda(f.options, memory.stream()),
        rng(seed) {}

  int pick(int n) { return std::uniform_int_distribution<int>(0, n - 1)(rng); }

  void open() {
    const int slot = cpu.open();
    REQUIRE(cuda.open() == slot);
    if (slot >= 0) slots.push_back(slot);
  }
  void close(int slot) {
    cpu.close(slot);
    cuda.close(slot);
    slots.erase(std::find(slots.begin(), slots.end(), slot));
  }

  std::vector<float> tokens(int side, int layer, int slot, int count, int first) const {
    std::vector<float> out;
    for (int t = 0; t < count; ++t)
      for (int h = 0; h < heads; ++h) {
        const auto row = f.row(side, layer, slot, h, first + t);
        out.insert(out.end(), row.begin(), row.end());
      }
    return out;
  }

  // Appends a chunk of a prompt to both stores.
  Fit append(int slot, int count) {
    const int first = cpu.position(slot);
    for (int layer = 0; layer < f.options.shape.layers; ++layer) {
      const auto k = tokens(0, layer, slot, count, first), v = tokens(1, layer, slot, count, first);
      OnDevice chunk;
      const Fit fit = cpu.append(layer, slot, k.data(), v.data(), count, first);
      REQUIRE(cuda.append(layer, slot, chunk.put(k.data(), k.size()), chunk.put(v.data(), v.size()), DType::f32,
                          std::int64_t{heads} * dim, count, first) == fit);
      memory.synchronize();
      if (fit != Fit::ok) return fit;
    }
    cpu.advance(slot, count, false);
    cuda.advance(slot, count, false);
    return Fit::ok;
  }

  // Appends one token to each of the slots, through rope_append with angles that turn nothing.
  Fit step(const std::vector<std::int32_t>& rows) {
    const Shape& s = f.options.shape;
    const int most = s.max_tokens, half = dim / 2;
    OnDevice chunk;
    const std::vector<float> one(static_cast<std::size_t>(most * half), 1.f), zero(one.size(), 0.f);
    std::vector<std::int32_t> position;
    for (const int slot : rows) position.push_back(cpu.position(slot));
    for (int layer = 0; layer < s.layers; ++layer) {
      std::vector<float> qkv;
      Fit fit = Fit::ok;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const auto k = tokens(0, layer, rows[r], 1, position[r]), v = tokens(1, layer, rows[r], 1, position[r]);
        qkv.resize(qkv.size() + static_cast<std::size_t>(s.query_heads * dim), 0.25f);
        qkv.insert(qkv.end(), k.begin(), k.end());
        qkv.insert(qkv.end(), v.begin(), v.end());
        if (fit == Fit::ok) fit = cpu.append(layer, rows[r], k.data(), v.data(), 1, position[r]);
      }
      ops::RopeAppendArgs a;
      a.heads = s.query_heads, a.kv_heads = heads, a.head_dim = dim;
      a.qkv = chunk.put(qkv.data(), qkv.size());
      a.qkv_stride = static_cast<std::int64_t>(qkv.size() / rows.size());
      a.cosine = chunk.put(one.data(), one.size());
      a.sine = chunk.put(zero.data(), zero.size());
      a.angles = most;
      a.position = chunk.put(position.data(), position.size());
      REQUIRE(cuda.before_step(layer, rows, a) == fit);
      if (fit != Fit::ok) return fit;
      ops::rope_append(a, memory.stream());
      memory.synchronize();
    }
    for (const int slot : rows) {
      cpu.advance(slot, 1, true);
      cuda.advance(slot, 1, true);
    }
    return Fit::ok;
  }

  // Random places of tokens (or pages) of each row and head. Each place is listed with probability `odds` / 11.
  std::vector<test::PerHead> some(const std::vector<std::int32_t>& rows, int layer, int odds, bool pages) {
    std::vector<test::PerHead> out;
    for (const int slot : rows) {
      test::PerHead row(static_cast<std::size_t>(heads));
      for (int h = 0; h < heads; ++h) {
        const int p = f.options.shape.page_size, n = cpu.length(layer, slot, h);
        for (int t = 0; t < (pages ? (n + p - 1) / p : n); ++t)
          if (pick(11) < odds) row[static_cast<std::size_t>(h)].push_back(t);
      }
      out.push_back(std::move(row));
    }
    return out;
  }

  // Applies fill(edits, list) to both stores.
  template <class Fill>
  void apply(const std::vector<std::int32_t>& rows, int layer, const std::vector<test::PerHead>& lists, Fill fill) {
    const BothLists both(lists, memory);
    Edits a(layer), b(layer);
    fill(a, both.host);
    fill(b, both.device);
    REQUIRE(cpu.apply(a.all(), rows).fit == Fit::ok);
    REQUIRE(cuda.apply(b.all(), rows).fit == Fit::ok);
    memory.synchronize();
  }

  bool resident(const std::vector<std::int32_t>& rows, int layer) const {
    for (const int slot : rows)
      for (int h = 0; h < heads; ++h)
        for (int t = 0; t < cpu.length(layer, slot, h); t += f.options.shape.page_size)
          if (!test::on(cpu, Tier::device, layer, slot, h, t / f.options.shape.page_size)) return false;
    return true;
  }

  // Ranks [row, kv_head, token] of few values, so that some are equal.
  std::vector<float> ranks(std::size_t rows, std::int64_t room) {
    std::vector<float> out(rows * static_cast<std::size_t>(heads * room));
    for (float& x : out) x = static_cast<float>(pick(40)) - 20.f;
    return out;
  }

  enum By { age, score, column };
  // Evicts all but keep(row, head) tokens of each head from both stores. pins: [row], or empty.
  template <class Keep>
  void evict_surplus(const std::vector<std::int32_t>& rows, int layer, By by, const std::vector<Pins>& pins,
                     const Keep& keep) {
    std::int64_t room = 1;
    std::vector<std::int32_t> amounts;
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (int h = 0; h < heads; ++h) {
        room = std::max<std::int64_t>(room, cpu.length(layer, rows[r], h));
        amounts.push_back(keep(r, h));
      }
    OnDevice there;
    const auto n = static_cast<std::int64_t>(rows.size());
    Surplus a, b;
    a.keep = View<const std::int32_t, 2>::dense(amounts.data(), {n, heads});
    b.keep = there.put(a.keep);
    if (!pins.empty()) a.pins = pins.data(), b.pins = there.put(pins);
    const auto values = ranks(rows.size(), room);
    const auto view = View<const float, 3>::dense(values.data(), {n, heads, room});
    if (by == score) {
      a.scores = view;
      b.scores = there.put(view);
    } else if (by == column) {
      a.column = b.column = pick(static_cast<int>(f.options.token_state.size()));
      if (resident(rows, layer)) {  // ops write token state on the device alone
        const PagedKv here = cpu.view(layer, rows), kv = cuda.view(layer, rows);
        ops::blend_state({&here, a.column}, 0, view, 1, Stream::cpu());
        ops::blend_state({&kv, b.column}, 0, there.put(view), 1, memory.stream());
      }
    }
    there.synchronize();
    Edits of_cpu(layer), of_cuda(layer);
    of_cpu.evict_surplus(a);
    of_cuda.evict_surplus(b);
    REQUIRE(cpu.apply(of_cpu.all(), rows).fit == Fit::ok);
    REQUIRE(cuda.apply(of_cuda.all(), rows).fit == Fit::ok);
    memory.synchronize();
  }

  void random_surplus(const std::vector<std::int32_t>& rows, int layer) {
    std::vector<Pins> pins;
    for (std::size_t r = 0; r < rows.size(); ++r) pins.push_back({pick(6), pick(30)});
    if (pick(4) == 0) pins.clear();
    const int most = pick(3) == 0 ? 40 : 2;
    evict_surplus(rows, layer, static_cast<By>(pick(f.options.token_state.empty() ? 2 : 3)), pins,
                  [&](std::size_t r, int h) { return cpu.length(layer, rows[r], h) + 1 - pick(most + 1); });
  }

  void attend(const std::vector<std::int32_t>& rows, int layer) {
    const bool pages = pick(2) == 1;
    // Attention reads pages on the device alone.
    auto lists = some(rows, layer, 4, pages);
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (int h = 0; h < heads; ++h)
        std::erase_if(lists[r][static_cast<std::size_t>(h)], [&](int i) {
          return !test::on(cpu, Tier::device, layer, rows[r], h, pages ? i : i / f.options.shape.page_size);
        });
    const BothLists both(lists, memory);
    Pins pins{pick(9), pick(9), pick(2) == 1};
    if (!resident(rows, layer)) pins = {};
    Edits a(layer), b(layer);
    if (pages && pick(2)) {
      a.attend(PageList{both.host}, pins);
      b.attend(PageList{both.device}, pins);
    } else if (pages) {
      a.attend_resident(PageList{both.host}, pins);
      b.attend_resident(PageList{both.device}, pins);
    } else {
      a.attend(TokenList{both.host}, pins);
      b.attend(TokenList{both.device}, pins);
    }
    const IndexList wanted = cpu.resolve_attend(a.all()[0], rows, cpu.workspace());
    const IndexList got = cuda.resolve_attend(b.all()[0], rows, cuda.workspace());
    const auto index = memory.get(got.index), count = memory.get(got.count);
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (int h = 0; h < heads; ++h) {
        const int n = wanted.count(static_cast<std::int64_t>(r), h);
        const std::size_t at = r * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h);
        REQUIRE(count[at] == n);
        for (int i = 0; i < n; ++i)
          REQUIRE(index[at * static_cast<std::size_t>(got.index.extent[2]) + static_cast<std::size_t>(i)] ==
                  wanted.index(static_cast<std::int64_t>(r), h, i));
      }
    cpu.workspace().reset();
    cuda.workspace().reset();
  }

  void encode(const std::vector<std::int32_t>& rows, int layer) {
    if (pick(2)) return encode_run(rows, layer);
    const int codec = pick(2);
    apply(rows, layer, some(rows, layer, 5, true), [&](Edits& e, const IndexList& l) { e.encode(PageList{l}, codec); });
  }

  // Pages that go on where those of the second codec end, as after a prompt; in some lists the last one is not full.
  void encode_run(const std::vector<std::int32_t>& rows, int layer) {
    const PagedKv kv = cpu.view(layer, rows);
    std::vector<test::PerHead> lists;
    for (const int slot : rows) {
      test::PerHead row(static_cast<std::size_t>(heads));
      for (int h = 0; h < heads; ++h) {
        const int first = kv.lower_pages(slot, h), p = kv.page_size,
                  more = (cpu.length(layer, slot, h) + p - 1) / p - first;
        for (int i = 0, count = more > 0 ? pick(more + 1) : 0; i < count; ++i)
          row[static_cast<std::size_t>(h)].push_back(first + i);
      }
      lists.push_back(std::move(row));
    }
    apply(rows, layer, lists, [&](Edits& e, const IndexList& l) { e.encode(PageList{l}, 1); });
  }

  // Random levels. Those of `rows` may be the rows of all layers.
  void store_as(const std::vector<std::int32_t>& rows, int layer) {
    const auto n = static_cast<std::int64_t>(rows.size()), room = std::int64_t{f.options.shape.max_tokens};
    const int odds = pick(8);  // so that sometimes nothing leaves, or nothing is low
    std::vector<std::uint8_t> levels;
    for (std::int64_t i = 0; i < n * heads * room; ++i)
      levels.push_back(pick(8) < odds ? std::uint8_t{1} : pick(9) == 0 && odds < 6 ? level_gone : std::uint8_t{0});
    OnDevice there;
    const auto view = Levels::dense(levels.data(), {n, heads, room});
    Edits a(layer), b(layer);
    a.store_as(view);
    b.store_as(there.put(view));
    REQUIRE(cpu.apply(a.all(), rows).fit == Fit::ok);
    REQUIRE(cuda.apply(b.all(), rows).fit == Fit::ok);
    memory.synchronize();
    cuda.workspace().reset();
  }

  // Evicts, moves or encodes in all layers by one edit.
  void edit_all_layers(const std::vector<std::int32_t>& rows, int verb) {
    const int codec = pick(2);
    std::vector<test::PerHead> lists;
    for (int layer = 0; layer < f.options.shape.layers; ++layer)
      for (auto& row : some(rows, layer, verb == 1 ? 0 : 3, verb == 2)) lists.push_back(std::move(row));
    for (std::size_t r = 0; verb == 1 && r < lists.size(); ++r)
      for (int h = 0; h < heads; ++h) {
        const int layer = static_cast<int>(r / rows.size());
        if (const int n = cpu.length(layer, rows[r % rows.size()], h); n > 0)
          lists[r][static_cast<std::size_t>(h)] = {pick(n), pick(n)};
      }
    apply(rows, 0, lists, [&](Edits& e, const IndexList& l) {
      e.for_all_layers();
      if (verb == 0)
        e.evict(TokenList{l});
      else if (verb == 1)
        e.move(TokenList{l});
      else
        e.encode(PageList{l}, codec);
    });
  }

  // What a decode step does to heads of all layers: a pair, a token that leaves, a page that is full or is not.
  void step_down(const std::vector<std::int32_t>& rows) {
    std::vector<test::PerHead> pairs, out, full;
    const int p = f.options.shape.page_size, odds = 1 + pick(3);
    for (int layer = 0; layer < f.options.shape.layers; ++layer)
      for (const int slot : rows) {
        test::PerHead of[3];
        const PagedKv kv = cpu.view(layer, rows);
        for (int h = 0; h < heads; ++h) {
          for (auto& list : of) list.emplace_back();
          int n = cpu.length(layer, slot, h);
          if (n > 0 && pick(4) < odds) of[0].back() = {pick(n), pick(3) ? pick(n) : n - 1};
          if (n > 0 && pick(4) < odds) of[1].back() = {pick(n)};
          // Often the token that has come to the pair's first place leaves, as a policy would say.
          if (!of[0].back().empty() && !of[1].back().empty() && pick(2)) of[1].back() = {of[0].back()[0]};
          n -= static_cast<int>(of[1].back().size());
          // Mostly the page behind those of the second codec, as a policy would say.
          const int pages = (n + p - 1) / p, next = kv.lower_pages(slot, h);
          if (pages > 0 && pick(4) < odds) of[2].back() = {pick(4) && next < pages ? next : pick(pages)};
        }
        pairs.push_back(of[0]), out.push_back(of[1]), full.push_back(of[2]);
      }
    const BothLists moves(pairs, memory), leave(out, memory), lower(full, memory);
    Edits a, b;
    for (Edits* e : {&a, &b}) {
      const bool host = e == &a;
      e->for_all_layers();
      e->move(TokenList{host ? moves.host : moves.device});
      e->evict(TokenList{host ? leave.host : leave.device});
      e->encode(PageList{host ? lower.host : lower.device}, 1);
    }
    REQUIRE(cpu.apply(a.all(), rows).fit == Fit::ok);
    REQUIRE(cuda.apply(b.all(), rows).fit == Fit::ok);
    memory.synchronize();
  }

  void two_codecs(const std::vector<std::int32_t>& rows, int layer) {
    const int what = pick(7);
    if (what >= 5) return step_down(rows);
    if (what <= 1)
      encode(rows, layer);
    else if (what <= 3 && f.options.rope != RopeRegime::re_rotate)
      store_as(rows, layer);
    else
      edit_all_layers(rows, pick(3));
  }

  void page_edit(const std::vector<std::int32_t>& rows, int layer) {
    if (f.options.codecs.size() > 1) return two_codecs(rows, layer);
    const int verb = pick(4);
    const Tier tier = pick(2) ? Tier::device : Tier::host, other = tier == Tier::host ? Tier::device : Tier::host;
    auto lists = some(rows, layer, 7, true);
    if (verb >= 2)
      for (std::size_t r = 0; r < rows.size(); ++r)
        for (int h = 0; h < heads; ++h)
          std::erase_if(lists[r][static_cast<std::size_t>(h)],
                        [&](int page) { return !test::on(cpu, other, layer, rows[r], h, page); });
    apply(rows, layer, lists, [&](Edits& e, const IndexList& l) {
      if (verb == 0)
        e.offload(PageList{l});
      else if (verb == 1)
        e.recall(PageList{l});
      else
        e.drop(tier, PageList{l});
    });
  }

  void place(const std::vector<std::int32_t>& rows, int layer) {
    Placing how;
    how.pins = {pick(9), pick(9), pick(2) == 1};
    how.room = pick(2) * pick(12);
    std::vector<float> scores;
    std::vector<std::int32_t> rooms;
    const std::int64_t entries = f.options.shape.max_pages();
    for (std::size_t i = 0; i < rows.size() * static_cast<std::size_t>(heads); ++i) rooms.push_back(pick(12));
    for (std::size_t i = 0; i < rooms.size() * static_cast<std::size_t>(entries); ++i)
      scores.push_back(pick(20) ? static_cast<float>(pick(9) - 4) : std::numeric_limits<float>::quiet_NaN());
    const auto rows_there = static_cast<std::int64_t>(rows.size());
    const auto order = View<const float, 3>::dense(scores.data(), {rows_there, heads, entries});
    const auto room_of = View<const std::int32_t, 2>::dense(rooms.data(), {rows_there, heads});
    const bool ordered = pick(2) == 1, varied = pick(3) == 0;
    how.reuse = pick(4) > 0;
    std::vector<std::uint8_t> flags, classes;
    for (int i = 0; i < f.options.shape.max_slots * heads; ++i) flags.push_back(pick(4) > 0);
    for (int h = 0; h < heads; ++h) classes.push_back(pick(3) == 0);
    const auto of = View<const std::uint8_t, 2>::dense(flags.data(), {f.options.shape.max_slots, heads});
    const BothLists both(some(rows, layer, pick(8), true), memory);
    Edits a(layer), b(layer);
    how.heads = Heads::flagged(of).except(classes.data());
    const Deadline kinds[] = {{}, {Deadline::this_attention}, {Deadline::sequence}, {Deadline::next_step}};
    how.when = kinds[pick(ordered || varied ? 2 : 4)];
    const bool waits = how.when.kind == Deadline::next_step || how.when.kind == Deadline::sequence;
    for (const int s : rows)
      if (waits && cpu.position(s) >= f.options.shape.max_tokens - 8) return;
    if (ordered) how.order = order;
    if (varied) how.rooms = room_of;
    a.place(PageList{both.host}, how);
    how.heads = Heads::flagged(memory.put(of)).except(memory.put(classes.data(), classes.size()));
    if (ordered) how.order = memory.put(order);
    if (varied) how.rooms = memory.put(room_of);
    b.place(PageList{both.device}, how);
    REQUIRE(cpu.apply(a.all(), rows).fit == Fit::ok);
    REQUIRE(cuda.apply(b.all(), rows).fit == Fit::ok);
    if (waits) {
      if (pick(2) && !f.options.host_codec.packs)
        move(rows, layer);  // another edit of the step comes first, whatever the order
      REQUIRE(step(rows) == Fit::ok);
    }
    cuda.start_reloads();
    memory.synchronize();
    cuda.workspace().reset();
  }

  // Marks of heads for both stores, [slot, kv_head].
  struct Marks {
    std::vector<std::uint8_t> flags;
    Heads host, device;
    Marks(Both& both, int odds) {
      const Shape& s = both.f.options.shape;
      for (int i = 0; i < s.max_slots * s.kv_heads; ++i) flags.push_back(both.pick(11) < odds);
      const auto of = View<const std::uint8_t, 2>::dense(flags.data(), {s.max_slots, s.kv_heads});
      host = Heads::flagged(of);
      device = Heads::flagged(both.memory.put(of));
    }
    Marks(const Marks&) = delete;
  };

  // Copies some heads of the rows to the host.
  void archive(const std::vector<std::int32_t>& rows, int layer, int odds = 8) {
    const Marks marks(*this, odds);
    Edits a(layer), b(layer);
    a.archive(marks.host);
    b.archive(marks.device);
    REQUIRE(cpu.apply(a.all(), rows).fit == Fit::ok);
    REQUIRE(cuda.apply(b.all(), rows).fit == Fit::ok);
    memory.synchronize();
  }

  // Fetches random tokens of some heads.
  void fetch(const std::vector<std::int32_t>& rows, int layer) {
    std::vector<test::PerHead> places;
    const int odds = pick(11);
    for (const int s : rows) {
      test::PerHead& row = places.emplace_back(static_cast<std::size_t>(heads));
      for (int h = 0; h < heads; ++h) {
        auto& of = row[static_cast<std::size_t>(h)];
        for (int t = 0; t < cpu.archived(layer, s, h); ++t)
          if (pick(11) < odds && std::ssize(of) < cpu.length(layer, s, h)) of.push_back(t);
      }
    }
    const Marks marks(*this, 8);
    const BothLists both(places, memory);
    const Deadline kinds[] = {{}, {}, {Deadline::next_step}, Deadline::in_steps(1)};
    const Deadline when = kinds[pick(4)];
    const bool waits = when.kind != Deadline::next_attention;
    for (const int s : rows)
      if (waits && cpu.position(s) >= f.options.shape.max_tokens - 8) return;
    Edits a(layer), b(layer);
    a.fetch(TokenList{both.host}, {marks.host, when});
    b.fetch(TokenList{both.device}, {marks.device, when});
    REQUIRE(cpu.apply(a.all(), rows).fit == Fit::ok);
    REQUIRE(cuda.apply(b.all(), rows).fit == Fit::ok);
    if (waits) REQUIRE(step(rows) == Fit::ok);
    memory.synchronize();
  }

  void move(const std::vector<std::int32_t>& rows, int layer) {
    std::vector<test::PerHead> pairs;
    for (const int s : rows) {
      test::PerHead row(static_cast<std::size_t>(heads));
      for (int h = 0; h < heads; ++h)
        if (const int n = cpu.length(layer, s, h); n > 0)
          for (int i = 2 * pick(3); i > 0; --i) row[static_cast<std::size_t>(h)].push_back(pick(n));
      pairs.push_back(std::move(row));
    }
    apply(rows, layer, pairs, [](Edits& e, const IndexList& l) { e.move(TokenList{l}); });
  }

  // The CPU turns keys on the device only, so every page goes there first.
  void recall_for_ranks(const std::vector<std::int32_t>& rows, int layer) {
    if (f.options.rope != RopeRegime::re_rotate) return;
    for (const int slot : rows) {
      REQUIRE(cpu.recall_all(layer, slot) == Fit::ok);
      REQUIRE(cuda.recall_all(layer, slot) == Fit::ok);
    }
    cpu.workspace().reset();
  }

  // Pages of such a codec keep their tokens.
  bool grouped() const { return f.options.codecs.size() > 1 && f.options.codecs[1].grouped(); }

  void random_edit() {
    const int what = pick(25);
    if (slots.empty() || what == 0) return open();
    const int slot = slots[static_cast<std::size_t>(pick(static_cast<int>(slots.size())))], layer = pick(2);
    std::vector<std::int32_t> rows;
    for (const int s : slots)
      if (s == slot || pick(2)) rows.push_back(s);
    const int room = f.options.shape.max_tokens - 8;
    cuda.await_reloads(pick(2) ? slots : rows);
    for (const int s : rows) CHECK(!cuda.reloading(s));
    if (what == 1 && pick(3) == 0) {
      close(slot);
    } else if (what <= 3) {
      if (const int count = 1 + pick(40); cpu.position(slot) + count < room) REQUIRE(append(slot, count) == Fit::ok);
    } else if (what <= 7) {
      for (const int s : rows)
        if (cpu.position(s) >= room) return;
      REQUIRE(step(rows) == Fit::ok);
    } else if (f.options.host_codec.packs && (what < 13 || what > 15)) {
      pick(2) ? place(rows, layer) : page_edit(rows, layer);
    } else if (grouped() && (what < 13 || what > 15)) {
      pick(3) ? encode(rows, layer) : edit_all_layers(rows, 2);
    } else if (what <= 9) {
      recall_for_ranks(rows, layer);
      apply(rows, layer, some(rows, layer, 1 + pick(11), false),
            [](Edits& e, const IndexList& l) { e.evict_rest(TokenList{l}); });
    } else if (what <= 11) {
      recall_for_ranks(rows, layer);
      apply(rows, layer, some(rows, layer, pick(11), false),
            [](Edits& e, const IndexList& l) { e.evict(TokenList{l}); });
    } else if (what == 12) {
      move(rows, layer);
    } else if (what == 13) {
      if (pick(2)) {
        const auto saved = pick(2) ? cpu.save(slot) : cuda.save(slot);
        REQUIRE(cpu.restore(slot, saved) == Fit::ok);
        REQUIRE(cuda.restore(slot, saved) == Fit::ok);
      } else {
        const Store::Aside of_cpu = cpu.set_aside(slot), of_cuda = cuda.set_aside(slot);
        for (const Tier tier : {Tier::device, Tier::host}) CHECK(of_cpu->page_bytes(tier) == of_cuda->page_bytes(tier));
        REQUIRE(cpu.bring_back(slot, of_cpu) == Fit::ok);
        REQUIRE(cuda.bring_back(slot, of_cuda) == Fit::ok);
      }
    } else if (what == 14) {
      attend(rows, layer);
    } else if (what == 15) {
      REQUIRE(cpu.recall_all(layer, slot) == Fit::ok);
      REQUIRE(cuda.recall_all(layer, slot) == Fit::ok);
      cpu.workspace().reset();
    } else if (what == 16) {
      for (const int s : rows)
        if (cpu.position(s) >= room) return;
      const Deadline when = pick(2) ? Deadline::in_steps(1) : Deadline{Deadline::next_step};
      const bool tiers = f.options.codecs.size() == 1;
      apply(rows, layer, some(rows, layer, 6, true), [&](Edits& e, const IndexList& l) {
        tiers ? e.recall(PageList{l}, when) : e.encode(PageList{l}, 1, when);
      });
      REQUIRE(step(rows) == Fit::ok);
    } else if (what <= 19) {
      recall_for_ranks(rows, layer);
      random_surplus(rows, layer);
    } else if (what <= 21 && f.options.host_pages) {
      place(rows, layer);
    } else if (f.options.archive) {
      pick(3) ? fetch(rows, layer) : archive(rows, layer);
    } else {
      page_edit(rows, layer);
    }
  }

  // A packed page's bytes; none of another page. Nobody writes the padding behind its text positions.
  static std::vector<std::byte> packed(const Store& store, int layer, int slot, int head, int page) {
    const std::vector<std::int32_t> slots{slot};
    const PagedKv kv = store.view(layer, slots, Tier::host);
    const PageEntry& e = kv.entry(0, head, page);
    if (!e.packed) return {};
    const PageLayout& l = kv.layout(e);
    std::vector<std::byte> bytes(kv.frame(e), kv.frame(e) + ops::packed_bytes(l, e));
    std::fill(bytes.begin() + 4 * l.page_size, bytes.begin() + ops::PackedPlaces(l).tail, std::byte{});
    return bytes;
  }

  void check() {
    cuda.check_invariants();
    cpu.check_invariants();
    for (const int slot : slots) {
      CAPTURE(slot);
      CHECK(cuda.position(slot) == cpu.position(slot));
      CHECK(cuda.steps(slot) == cpu.steps(slot));
      const auto copy = cuda.copy_of(slot);
      for (int layer = 0; layer < f.options.shape.layers; ++layer)
        for (int h = 0; h < heads; ++h) {
          CAPTURE(layer, h);
          REQUIRE(cuda.length(layer, slot, h) == cpu.length(layer, slot, h));
          CHECK(cuda.max_length(layer, {slot}) >= cpu.max_length(layer, {slot}));
          CHECK(cuda.positions(layer, slot, h) == cpu.positions(layer, slot, h));
          CHECK(cuda.archived(layer, slot, h) == cpu.archived(layer, slot, h));
          REQUIRE(test::stored_tokens(*copy, layer, 0, h) == test::stored_tokens(cpu, layer, slot, h));
          const int p = f.options.shape.page_size;
          for (int page = 0; page * p < cpu.length(layer, slot, h); ++page) {
            for (const Tier tier : {Tier::device, Tier::host})
              REQUIRE(test::on(*copy, tier, layer, 0, h, page) == test::on(cpu, tier, layer, slot, h, page));
            REQUIRE(packed(*copy, layer, 0, h, page) == packed(cpu, layer, slot, h, page));
            if (f.options.summary != Summary::none)
              REQUIRE(std::memcmp(copy->summaries(layer).at(0, h, page), cpu.summaries(layer).at(slot, h, page),
                                  static_cast<std::size_t>(cpu.summaries(layer).page_stride)) == 0);
          }
        }
    }
    CHECK(unused_bytes(cuda) == unused_bytes(cpu));
    for (const Tier tier : {Tier::device, Tier::host}) {
      for (int t = 0; t < tag_count; ++t) {
        if (static_cast<Tag>(t) == Tag::workspace) continue;
        CAPTURE(static_cast<int>(tier), name_of(static_cast<Tag>(t)));
        CHECK(cuda.ledger().held(tier)[static_cast<std::size_t>(t)] ==
              cpu.ledger().held(tier)[static_cast<std::size_t>(t)]);
        CHECK(cuda.ledger().moved(tier)[static_cast<std::size_t>(t)] ==
              cpu.ledger().moved(tier)[static_cast<std::size_t>(t)]);
        for (const Stored as : all_stored) {
          CAPTURE(static_cast<int>(as));
          CHECK(cuda.ledger().held(tier, as)[static_cast<std::size_t>(t)] ==
                cpu.ledger().held(tier, as)[static_cast<std::size_t>(t)]);
          CHECK(cuda.ledger().moved(tier, as)[static_cast<std::size_t>(t)] ==
                cpu.ledger().moved(tier, as)[static_cast<std::size_t>(t)]);
        }
      }
    }
    CHECK(cuda.fired() == cpu.fired());
  }

  StoreFixture f;
  int heads, dim;
  OnDevice memory;
  CpuStore cpu;
  CudaStore cuda;
  std::vector<std::int32_t> slots;
  std::mt19937 rng;
};

// Whether the store's next exact answer says that a page was read that is not on the device.
bool reads_absent(CudaStore& store) {
  try {
    store.ledger();
    return false;
  } catch (const Error& e) {
    CHECK(e.code() == Errc::plugin);
    CHECK_THAT(e.what(), Catch::Contains("a page which is not on the device"));
    return true;
  }
}

StoreFixture fixture(int kind) {
  if (kind >= 17) {  // summaries in codes
    constexpr int others[] = {0, 5, 12, 3};
    StoreFixture f = fixture(others[kind - 17]);
    f.options.summary_bits = 8;
    return f;
  }
  StoreFixture f;
  Shape& s = f.options.shape;
  s.max_tokens = 128;
  f.options.host_pages = f.options.pauses = kind != 4 && (kind < 11 || kind > 14);
  if (kind == 0) {
    f.options.summary = Summary::mean;
    f.options.token_state = {"score"};
  } else if (kind == 1) {
    s.dtype = DType::bf16, s.head_dim = 64, s.page_size = 8, s.kv_heads = 3, s.query_heads = 6;
    f.options.summary = Summary::min_max;
  } else if (kind == 2) {
    s.dtype = DType::bf16, s.head_dim = 24, s.page_size = 16;
    f.options.codecs = {CodecSpec{{8}, {8}}};
    f.options.host_codec = f.options.codecs[0];
    f.options.summary = Summary::min_max;
    f.options.token_state = {"a", "b", "c", "d", "e"};
  } else if (kind == 3) {
    s.dtype = DType::f16, s.head_dim = 40, s.page_size = 8;
    f.options.host_codec = CodecSpec{{4}, {8, CodeKind::e4m3}};
    f.options.summary = Summary::centre_radius;
  } else if (kind == 5) {
    s.dtype = DType::bf16, s.head_dim = 64, s.page_size = 8, s.kv_heads = 3, s.query_heads = 6;
    f.options.host_codec = CodecSpec{{8}, {8}};
    f.options.summary = Summary::min_max;
    f.options.token_state = {"score"};
  } else if (kind == 6) {
    s.dtype = DType::f16, s.head_dim = 256, s.page_size = 4, s.kv_heads = 1, s.query_heads = 1;
    f.options.codecs = {CodecSpec{{8}, {0}}};
    f.options.host_codec = CodecSpec{{8}, {8}};
    f.options.summary = Summary::mean;
  } else if (kind == 7) {
    s.dtype = DType::bf16, s.head_dim = 24, s.page_size = 16;
    f.options.codecs = {CodecSpec{{8}, {8}}};
    f.options.host_codec = CodecSpec{};
    f.options.token_state = {"a", "b", "c", "d", "e"};
  } else if (kind == 8) {
    s.dtype = DType::bf16, s.head_dim = 80, s.page_size = 8;
    f.options.codecs = {CodecSpec{{4}, {2}}};
    f.options.host_codec = f.options.codecs[0];
    f.options.summary = Summary::min_max;
    f.options.token_state = {"score"};
  } else if (kind == 9) {
    s.dtype = DType::bf16, s.head_dim = 64, s.page_size = 16;
    f.options.codecs = {CodecSpec{{8}, {4}}};
    f.options.host_codec = CodecSpec{{4}, {2}};
    f.options.summary = Summary::centre_radius;
    f.options.token_state = {"score"};
  } else if (kind == 10) {
    s.dtype = DType::f16, s.head_dim = 128, s.page_size = 4, s.kv_heads = 1, s.query_heads = 2;
    f.options.codecs = {CodecSpec{{8, CodeKind::e4m3}, {8, CodeKind::e4m3}}};
    f.options.host_codec = CodecSpec{{8}, {8, CodeKind::e4m3}};
    f.options.summary = Summary::mean;
  } else if (kind == 11) {
    s.dtype = DType::bf16, s.head_dim = 128, s.page_size = 16, s.max_tokens = 256;
    f.options.codecs = {CodecSpec{{8}, {4}}, CodecSpec{{4}, {2}}};
    f.options.host_codec = f.options.codecs[0];
    f.options.token_state = {"score"};
    f.options.all_layers = true;
  } else if (kind == 12) {
    s.dtype = DType::bf16, s.head_dim = 64, s.page_size = 8, s.kv_heads = 3, s.query_heads = 6;
    f.options.codecs = {CodecSpec{}, CodecSpec{{8, CodeKind::e4m3}, {4}}};
    f.options.summary = Summary::min_max;
    f.options.all_layers = true;
  } else if (kind == 4) {
    s.dtype = DType::bf16, s.head_dim = 256, s.page_size = 4, s.kv_heads = 1, s.query_heads = 1;
    f.options.codecs = {CodecSpec{{8}, {0}}};
    f.options.host_codec = f.options.codecs[0];
  } else if (kind == 13) {
    s.dtype = DType::bf16, s.head_dim = 64, s.page_size = 16;
    f.options.codecs = {CodecSpec{}, CodecSpec{{4, CodeKind::integer, CodeAxis::channel, 8}, {4, {}, {}, 32}}};
    f.options.summary = Summary::min_max;
    f.options.token_state = {"score"};
    f.options.all_layers = true;
  } else if (kind == 15 || kind == 16) {
    s.dtype = DType::bf16, s.head_dim = kind == 15 ? 64 : 24, s.page_size = kind == 15 ? 16 : 5;
    f.options.host_codec.packs = f.wild = true;
    f.options.summary = Summary::min_max;
  } else {
    s.dtype = DType::bf16, s.head_dim = 80, s.page_size = 8, s.kv_heads = 3, s.query_heads = 6;
    f.options.codecs = {CodecSpec{}, CodecSpec{{2, CodeKind::integer, CodeAxis::channel}, {2, {}, {}, 16}}};
    f.options.all_layers = true;
  }
  f.inv_freq = test::test_inv_freq(s.head_dim);
  f.options.rope_table = {f.inv_freq.data(), s.head_dim, 1.f};
  return f;
}

}  // namespace

TEST_CASE("cuda store: random edits leave what they leave on the CPU") {
  const int kind = GENERATE(range(0, 21));
  const RopeRegime rope = GENERATE(RopeRegime::original, RopeRegime::re_rotate);
  for (unsigned seed = 1; seed <= (cases::quick() ? 1 : 6); ++seed) {
    StoreFixture f = fixture(kind);
    f.options.rope = rope;
    Both both(f, seed);
    for (int i = 0; i < 200; ++i) {
      CAPTURE(kind, static_cast<int>(rope), seed, i);
      both.random_edit();
      if (i % 5 == 4) both.check();
    }
  }
}

TEST_CASE("cuda store: many packed pages leave, come and go down in one launch") {
  StoreFixture f = fixture(15);
  Shape& s = f.options.shape;
  s.page_size = 64, s.head_dim = 256, s.kv_heads = s.query_heads = 2, s.max_tokens = 64 * 56, s.layers = 1;
  f.inv_freq = test::test_inv_freq(s.head_dim);
  f.options.rope_table = {f.inv_freq.data(), s.head_dim, 1.f};
  f.options.summary = Summary::none;
  Both both(f, 1);
  both.open();
  // Few pages fit into shared memory at once, so each team of warps has many jobs.
  REQUIRE(both.append(both.slots[0], 64 * 48) == Fit::ok);
  const auto keep = [&](int first, int last, bool reuse) {
    std::vector<std::int32_t> pages;
    for (int page = first; page < last; ++page) pages.push_back(page);
    both.apply(both.slots, 0, {test::PerHead(2, pages)}, [&](Edits& e, const IndexList& l) {
      e.place(PageList{l}, {.room = 1, .reuse = reuse, .when = {Deadline::this_attention}});
    });
    both.cuda.workspace().reset();
    both.check();
  };
  keep(0, 46, true);  // two go down and leave
  REQUIRE(both.append(both.slots[0], 64 * 2) == Fit::ok);
  keep(0, 1, true);  // 46 leave, of which 45 are on the host
  keep(10, 40, true);
  keep(30, 32, true);
  keep(0, 30, false);
  REQUIRE(both.append(both.slots[0], 64 * 4) == Fit::ok);
  keep(20, 21, false);
}

TEST_CASE("cuda store: what the host plans is what kernels plan") {
  const int kind = GENERATE(range(11, 15));
  for (unsigned seed = 1; seed <= (cases::quick() ? 1 : 3); ++seed) {
    StoreFixture f = fixture(kind);
    f.options.planned_on_host = true;
    Both both(f, seed);
    for (int i = 0; i < 200; ++i) {
      CAPTURE(kind, seed, i);
      both.random_edit();
      if (i % 5 == 4) both.check();
    }
  }
}

TEST_CASE("cuda store: extents of the arena go to the codec that needs them, and come back") {
  StoreFixture f = fixture(11);
  f.options.shape.layers = 1;
  f.options.shape.max_slots = 4;
  f.options.shape.max_tokens = 512;
  const std::int64_t high = frame_layout(f.options, f.options.codecs[0]).bytes;
  f.options.device_limit = 2 * 3 * 32 * high;  // three sequences of 512 tokens, two heads
  Both both(f, 1);
  const auto levels = [&](std::uint8_t level) {
    const std::vector<std::uint8_t> all(2 * 512, level);
    Edits a, b;
    OnDevice there;
    const auto view = Levels::dense(all.data(), {1, 2, 512});
    a.store_as(view), b.store_as(there.put(view));
    const std::vector<std::int32_t> one{both.slots.back()};
    REQUIRE(both.cpu.apply(a.all(), one).fit == Fit::ok);
    const Fit fit = both.cuda.apply(b.all(), one).fit;
    both.memory.synchronize();
    both.cuda.workspace().reset();
    return fit;
  };
  for (int round = 0; round < 3; ++round) {
    CAPTURE(round);
    // Four sequences fit where each is low before the next comes; of high ones no fourth does.
    for (int i = 0; i < 4; ++i) {
      both.open();
      REQUIRE(both.append(both.slots.back(), 320) == Fit::ok);
      REQUIRE(levels(1) == Fit::ok);
      both.check();
    }
    const std::int64_t low = frame_layout(f.options, f.options.codecs[1]).bytes;
    CHECK(both.cuda.page_bytes(Tier::device) == 4 * 2 * 20 * low);
    while (!both.slots.empty()) both.close(both.slots[0]);
    // The memory is the first codec's again.
    for (int i = 0; i < 2; ++i) {
      both.open();
      REQUIRE(both.append(both.slots.back(), 448) == Fit::ok);
    }
    both.check();
    while (!both.slots.empty()) both.close(both.slots[0]);
  }
}

TEST_CASE("cuda store: a sequence alone has room, whichever codec had the extents before") {
  StoreFixture f = fixture(11);
  f.options.shape.layers = 1;
  f.options.shape.max_slots = 4;
  f.options.shape.max_tokens = 512;
  const std::int64_t high = frame_layout(f.options, f.options.codecs[0]).bytes;
  // A sequence of 256 tokens has 32 pages, and as many of each codec are reserved to store it anew.
  f.options.device_limit = 110 * high;
  Both both(f, 1);
  std::mt19937 rng(13);
  for (int round = 0; round < 40; ++round) {
    if (rng() % 2)  // the first codec takes nearly all
      for (int i = 0; i < 2; ++i) {
        both.open();
        REQUIRE(both.append(both.slots.back(), 384) == Fit::ok);
      }
    while (!both.slots.empty()) both.close(both.slots[0]);
    const int tokens = 1 + static_cast<int>(rng() % 256);
    const std::vector<std::uint8_t> all(2 * 512, 1);
    CAPTURE(round, tokens);
    both.open();
    REQUIRE(both.append(both.slots.back(), tokens) == Fit::ok);
    Edits a, b;
    OnDevice there;
    const auto view = Levels::dense(all.data(), {1, 2, 512});
    a.store_as(view), b.store_as(there.put(view));
    REQUIRE(both.cpu.apply(a.all(), both.slots).fit == Fit::ok);
    REQUIRE(both.cuda.apply(b.all(), both.slots).fit == Fit::ok);
    both.memory.synchronize();
    both.cuda.workspace().reset();
    both.check();
    both.close(both.slots[0]);
  }
}

TEST_CASE("cuda store: a rewrite leaves what it leaves on the CPU") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  const Summary summary = GENERATE(Summary::none, Summary::min_max, Summary::mean);
  const bool host = GENERATE(false, true);
  CAPTURE(name_of(dtype), static_cast<int>(summary), host);
  StoreFixture f = fixture(0);
  f.options.functional = true;
  f.options.shape.dtype = dtype;
  f.options.codecs = {CodecSpec{}};
  f.options.host_codec = {};
  f.options.rope = RopeRegime::original;
  f.options.summary = summary;
  f.options.host_pages = host;
  f.options.pauses = f.options.archive = false;
  Both both(f, 1);
  both.open();
  both.open();
  for (const int slot : both.slots) REQUIRE(both.append(slot, 45 - 20 * slot) == Fit::ok);
  const std::vector<std::int32_t> rows{both.slots[1], both.slots[0]};
  if (host)
    both.apply(rows, 1, both.some(rows, 1, 7, true), [](Edits& e, const IndexList& l) { e.offload(PageList{l}); });
  for (const KvSide side : {KvSide::key, KvSide::value}) {
    // Half of the elements stay as they are, and whole pages of some heads.
    const std::int64_t room = 50;
    std::vector<float> values;
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (int h = 0; h < both.heads; ++h)
        for (int t = 0; t < room; ++t)
          for (const float x : f.row(side == KvSide::key ? 0 : 1, 1, rows[r], h, t))
            values.push_back(both.pick(2) && (t > 20 || h) ? x + 1.1f : x);
    OnDevice there;
    const auto view = View<const float, 4>::dense(values.data(),
                                                  {static_cast<std::int64_t>(rows.size()), both.heads, room, both.dim});
    Edits a(1), b(1);
    a.rewrite(side, view);
    b.rewrite(side, there.put(view));
    for (int again = 0; again < 2; ++again) {  // the second one changes nothing
      REQUIRE(both.cpu.apply(a.all(), rows).fit == Fit::ok);
      REQUIRE(both.cuda.apply(b.all(), rows).fit == Fit::ok);
      both.check();
      CHECK(both.cuda.fired() == both.cpu.fired());
    }
  }
  REQUIRE(both.step(rows) == Fit::ok);
  both.check();
  for (int i = 0; i < 4; ++i) {
    CAPTURE(i);
    const KvSide side = i % 2 ? KvSide::value : KvSide::key;
    const auto n = static_cast<std::int64_t>(rows.size());
    std::vector<std::int32_t> first, count;
    int room = 1;
    for (const int slot : rows)
      for (int h = 0; h < both.heads; ++h) {
        const int length = both.cpu.length(1, slot, h);
        first.push_back(both.pick(length + 1));
        count.push_back(both.pick(std::min(9 * i, length - first.back()) + 1));
        room = std::max(room, count.back());
      }
    std::vector<float> values(static_cast<std::size_t>(n * both.heads * room * both.dim));
    for (float& x : values) x = static_cast<float>(both.pick(64)) / 8;
    OnDevice there;
    const auto view = View<const float, 4>::dense(values.data(), {n, both.heads, room, both.dim});
    const TokenRange range{View<const std::int32_t, 2>::dense(first.data(), {n, both.heads}),
                           View<const std::int32_t, 2>::dense(count.data(), {n, both.heads})};
    Edits a(1), b(1);
    a.rewrite(side, view, range);
    b.rewrite(side, there.put(view), {there.put(range.first), there.put(range.count)});
    REQUIRE(both.cpu.apply(a.all(), rows).fit == Fit::ok);
    REQUIRE(both.cuda.apply(b.all(), rows).fit == Fit::ok);
    both.check();
  }
}

TEST_CASE("cuda store: a rewrite of a range wants its own pages on the device, and stays in the head and the rows") {
  StoreFixture f = fixture(0);
  f.options.functional = f.options.host_pages = true;
  f.options.codecs = {CodecSpec{}};
  f.options.host_codec = {};
  f.options.rope = RopeRegime::original;
  f.options.pauses = f.options.archive = false;
  Both both(f, 1);
  both.open();
  const std::vector<std::int32_t> rows{both.slots[0]};
  const int p = f.options.shape.page_size, n = 3 * p + 1;
  REQUIRE(both.append(rows[0], n) == Fit::ok);
  const std::vector<test::PerHead> away{test::PerHead(static_cast<std::size_t>(both.heads), {0})};
  OnDevice lists;
  const BothLists list(away, lists);
  const auto apply = [&](const Edits& a, const Edits& b) {
    REQUIRE(both.cpu.apply(a.all(), rows).fit == Fit::ok);
    REQUIRE(both.cuda.apply(b.all(), rows).fit == Fit::ok);
    both.check();
  };
  for (const bool drops : {false, true}) {
    Edits a(1), b(1);
    if (drops)
      a.drop(Tier::device, PageList{list.host}), b.drop(Tier::device, PageList{list.device});
    else
      a.offload(PageList{list.host}), b.offload(PageList{list.device});
    apply(a, b);
  }
  const int room = p + 2;
  const std::vector<float> values(static_cast<std::size_t>(both.heads * room * both.dim), 3);
  const auto view = View<const float, 4>::dense(values.data(), {1, both.heads, room, both.dim});
  // Counts beyond the head and beyond the rows: a GPU takes what is inside.
  for (const auto& c :
       std::vector<std::array<int, 2>>{{p, room}, {p, n}, {2 * p, n}, {n - 1, 5}, {n + 9, 5}, {-3, 0}}) {
    CAPTURE(c[0], c[1]);
    const int inside = std::clamp(c[0], 0, n), most = std::min({c[1], room, n - inside});
    const std::vector<std::int32_t> from(static_cast<std::size_t>(both.heads), c[0]), count(from.size(), c[1]);
    const std::vector<std::int32_t> begin(from.size(), inside), fits(from.size(), most);
    const auto of = [&](const std::vector<std::int32_t>& x) {
      return View<const std::int32_t, 2>::dense(x.data(), {1, both.heads});
    };
    OnDevice there;
    Edits a(1), b(1);
    a.rewrite(KvSide::value, view, {of(begin), of(fits)});
    b.rewrite(KvSide::value, there.put(view), {there.put(of(from)), there.put(of(count))});
    apply(a, b);
  }
}

namespace {

// A store whose heads have archives, of a shape and a codec of fixture().
StoreFixture archiving(int kind) {
  StoreFixture f = fixture(kind);
  f.options.archive = true;
  f.options.host_pages = f.options.pauses = false;
  f.options.summary = Summary::none;
  f.options.host_codec = f.options.codecs[0];
  return f;
}

}  // namespace

TEST_CASE("cuda store: random edits beside archives leave what they leave on the CPU") {
  const int kind = GENERATE(0, 1, 2, 3, 7, 8, 10);
  for (unsigned seed = 1; seed <= (cases::quick() ? 2 : 8); ++seed) {
    Both both(archiving(kind), seed);
    for (int i = 0; i < 200; ++i) {
      CAPTURE(kind, seed, i);
      both.random_edit();
      if (i % 5 == 4) both.check();
    }
  }
}

TEST_CASE("cuda store: a prompt's archive, an eviction and fetches leave what they leave on the CPU") {
  StoreFixture f = archiving(1);
  f.options.shape.max_tokens = 900;
  Both both(f, 1);
  both.open();
  both.open();
  const std::vector<std::int32_t> rows{both.slots[1], both.slots[0]};
  for (const int slot : rows) REQUIRE(both.append(slot, 800 - 100 * slot) == Fit::ok);
  both.archive(rows, 0, 11);
  both.check();
  both.apply(rows, 0, both.some(rows, 0, 5, false), [](Edits& e, const IndexList& l) { e.evict_rest(TokenList{l}); });
  for (int i = 0; i < 6; ++i) {
    both.fetch(rows, 0);
    both.check();
    REQUIRE(both.step(rows) == Fit::ok);
  }
  both.close(rows[0]);
  both.close(rows[1]);
  CHECK(both.cuda.page_bytes(Tier::host) == 0);
  both.check();
}

TEST_CASE("cuda store: archives take the frames of those that they replace, and too many are out of memory") {
  StoreFixture f = archiving(1);
  constexpr int frames = 3 * 5 + 2;  // 3 heads of 5 pages, and some
  f.options.host_limit = frames * frame_layout(f.options, {}).bytes;
  Both both(f, 1);
  both.open();
  both.open();
  for (const int slot : both.slots) REQUIRE(both.append(slot, 40) == Fit::ok);
  const std::vector<std::int32_t> first{both.slots[0]}, second{both.slots[1]};
  for (int i = 0; i < 3; ++i) {
    both.archive(first, 0, 11);
    both.check();
  }
  Edits edits(0);
  edits.archive({});
  CHECK(both.cpu.apply(edits.all(), second).fit == Fit::out_of_memory);
  CHECK(both.cuda.apply(edits.all(), second).fit == Fit::out_of_memory);
  both.cuda.check_invariants();
  both.cpu.check_invariants();
  both.close(first[0]);
  both.archive(second, 0, 11);
  CHECK(both.cuda.page_bytes(Tier::host) == both.cpu.page_bytes(Tier::host));
  both.cuda.check_invariants();
}

TEST_CASE("cuda store: fetches of what is not there are refused and change nothing") {
  Both both(archiving(1), 1);
  both.open();
  REQUIRE(both.append(both.slots[0], 20) == Fit::ok);
  both.archive(both.slots, 0, 11);
  const std::vector<test::PerHead> few{test::PerHead(3, {0, 1, 2})};
  both.apply(both.slots, 0, few, [](Edits& e, const IndexList& l) { e.evict_rest(TokenList{l}); });
  for (const std::vector<std::int32_t>& list : {std::vector<std::int32_t>{3, 2}, {5, 5}, {20}, {-1, 4}, {0, 1, 2, 3}}) {
    const BothLists lists({test::PerHead(3, list)}, both.memory);
    Edits e(0);
    e.fetch(TokenList{lists.device}, {});
    CHECK(both.cuda.apply(e.all(), both.slots).fit == Fit::ok);
    CHECK_THROWS_WITH(both.cuda.ledger(), Catch::Contains("its archive"));
    both.check();
  }
}

TEST_CASE("cuda store: keys of tokens that stay turn by the places that they go down, wherever they lie") {
  StoreFixture f = fixture(1);
  f.options.rope = RopeRegime::re_rotate;
  f.options.shape.dtype = DType::f32;
  f.options.rope_table.attention_scale = 3;  // keys must not be scaled again
  Both both(f, 1);
  both.open();
  const int slot = both.slots[0];
  REQUIRE(both.append(slot, 40) == Fit::ok);
  const auto apply = [&](test::PerHead lists, auto fill) {
    const BothLists list({std::move(lists)}, both.memory);
    Edits e(0);
    fill(e, list.device);
    REQUIRE(both.cuda.apply(e.all(), {slot}).fit == Fit::ok);
  };
  // Page 2 is on both tiers, page 3 on the host alone, the others on the device alone.
  apply({{2, 3}, {2, 3}, {2, 3}}, [](Edits& e, const IndexList& l) { e.offload(PageList{l}); });
  apply({{3}, {3}, {3}}, [](Edits& e, const IndexList& l) { e.drop(Tier::device, PageList{l}); });
  // The first head loses a token, the second one two, the third one none.
  apply({{20}, {20, 21}, {}}, [](Edits& e, const IndexList& l) { e.evict(TokenList{l}); });
  both.cuda.check_invariants();
  const auto copy = both.cuda.copy_of(slot);
  RopeTable turn = f.options.rope_table;
  turn.attention_scale = 1;
  for (int head = 0; head < 3; ++head) {
    const int lost = head == 2 ? 0 : head + 1;
    const auto tokens = test::stored_tokens(*copy, 0, 0, head);
    CHECK(static_cast<int>(tokens.size()) == 40 - lost);
    for (const test::StoredToken& token : tokens) {
      auto key = f.row(0, 0, slot, head, token.position);
      if (token.position > 20) ops::rotate(key.data(), turn, -lost);
      for (std::size_t d = 0; d < key.size(); ++d) CHECK(std::abs(token.k[d] - key[d]) < 1e-5);
    }
    // A changed page loses its lower copy, unless that is its only one.
    CHECK(test::on(*copy, Tier::host, 0, 0, head, 2) == (lost == 0));
    CHECK(test::on(*copy, Tier::host, 0, 0, head, 3));
    CHECK(!test::on(*copy, Tier::device, 0, 0, head, 3));
  }
}

TEST_CASE("cuda store: a list that score_pages chose for an attention is attended to as it is, and counts once") {
  const StoreFixture f = fixture(1);
  const Shape& s = f.options.shape;
  Both both(f, 1);
  std::vector<std::int32_t> rows;
  for (const int tokens : {100, 9, 40}) {
    both.open();
    rows.push_back(both.slots.back());
    REQUIRE(both.append(rows.back(), tokens) == Fit::ok);
  }
  const std::int64_t n = std::ssize(rows), heads = s.kv_heads, pages = s.max_pages();
  std::vector<float> query(static_cast<std::size_t>(n * s.query_heads * s.head_dim));
  for (float& x : query) x = static_cast<float>(both.pick(9) - 4);
  const auto queries = both.memory.put(View<const float, 3>::dense(query.data(), {n, s.query_heads, s.head_dim}));
  const auto scores = View<float, 3>::dense(both.memory.take<float>(n * heads * pages), {n, heads, pages});
  const PagedKv kv = both.cuda.view(0, rows);
  const Summaries summaries = both.cuda.summaries(0);
  std::vector<std::int32_t> unwritten(static_cast<std::size_t>(n * heads * pages), 0);

  struct Wanted {
    PageChoice choice;
    Pins pins;
    bool as_it_is, fires;
  };
  // In a step the choice may wait for attention. Here the next op, or a look at memory, makes it.
  const bool waits = GENERATE(false, true);
  CAPTURE(waits);
  const auto scope = waits ? std::make_unique<PutOffScope>() : nullptr;
  PageChoice few, all, newest, some_pages;
  few.budget = newest.budget = some_pages.budget = 3;
  all.budget = static_cast<int>(pages);
  newest.newest_page = true;
  some_pages.leave_out = {9, 0};
  for (const auto& [choice, pins, as_it_is, fires] : {Wanted{few, {}, true, true},
                                                      {all, {}, true, false},
                                                      {newest, {0, 0, true}, true, true},
                                                      {few, {0, 0, true}, false, true},
                                                      {few, {3, 0}, false, true},
                                                      {few, {100, 0}, false, false},
                                                      {some_pages, {9, 0}, false, true}}) {
    CAPTURE(choice.budget, choice.newest_page, choice.leave_out.first, pins.first, pins.newest_page);
    ops::FinalList* note = both.cuda.final_list();
    REQUIRE(note);
    note->pins = pins;
    PageList list;
    list.index = View<std::int32_t, 3>::dense(both.memory.put(unwritten), {n, heads, pages});
    list.count = View<std::int32_t, 2>::dense(both.memory.put(unwritten), {n, heads});
    list.final = note;
    const auto before = both.cuda.fired();
    ops::score_pages(queries, kv, summaries, choice, scores, list, both.memory.stream());
    CHECK((ops::put_off_choice() != nullptr) == waits);
    Edits edits(0), plain(0);
    edits.attend(list, pins);
    const IndexList got = both.cuda.resolve_attend(edits.all()[0], rows, both.cuda.workspace());
    CHECK((got.index.data == list.index.data) == as_it_is);
    CHECK(both.cuda.fired() == before + fires);
    list.final = nullptr;
    plain.attend(list, pins);
    const IndexList wanted = both.cuda.resolve_attend(plain.all()[0], rows, both.cuda.workspace());
    CHECK(wanted.index.data != list.index.data);
    const auto count = both.memory.get(got.count), index = both.memory.get(got.index),
               wanted_index = both.memory.get(wanted.index);
    REQUIRE(count == both.memory.get(wanted.count));
    for (std::size_t h = 0; h < count.size(); ++h)
      for (std::size_t i = 0; i < static_cast<std::size_t>(count[h]); ++i)
        REQUIRE(index[h * static_cast<std::size_t>(got.index.extent[2]) + i] ==
                wanted_index[h * static_cast<std::size_t>(wanted.index.extent[2]) + i]);
    both.cuda.workspace().reset();
  }

  // Another op writes the list, the store is asked anew, or the edit is of another layer or other rows.
  for (const char* change : {"overwritten", "asked anew", "another layer", "other rows", "other pins"}) {
    CAPTURE(change);
    const auto is = [&](const char* what) { return std::string_view(change) == what; };
    PageList list;
    list.index = View<std::int32_t, 3>::dense(both.memory.put(unwritten), {n, heads, pages});
    list.count = View<std::int32_t, 2>::dense(both.memory.put(unwritten), {n, heads});
    list.final = both.cuda.final_list();
    const auto before = both.cuda.fired();
    ops::score_pages(queries, kv, summaries, few, scores, list, both.memory.stream());
    if (is("overwritten")) ops::older_pages(kv.length, nullptr, s.page_size, 1, list, both.memory.stream());
    if (is("asked anew")) both.cuda.final_list();
    Edits edits(is("another layer"));
    edits.attend(list, {0, is("other pins"), false});
    const std::vector<std::int32_t> of = is("other rows") ? std::vector{rows[0], rows[1]} : rows;
    const IndexList got = both.cuda.resolve_attend(edits.all()[0], of, both.cuda.workspace());
    CHECK(got.index.data != list.index.data);
    CHECK(both.cuda.fired() == before + 1 + is("asked anew"));
    if (is("overwritten")) {  // by the op that came later
      const auto count = both.memory.get(list.count);
      for (std::size_t i = 0; i < count.size(); ++i) {
        const int tokens = both.cuda.length(0, rows[i / static_cast<std::size_t>(heads)], 0);
        CHECK(count[i] == (tokens + s.page_size - 1) / s.page_size - 1);
      }
    }
    both.cuda.workspace().reset();
  }
}

TEST_CASE("cuda store: keys turn in the codec of the tier that they are on") {
  StoreFixture f = fixture(1);
  f.options.rope = RopeRegime::re_rotate;
  f.options.shape.dtype = DType::f32;
  const bool below = GENERATE(true, false);  // is int8 the host's codec, or the device's?
  (below ? f.options.host_codec : f.options.codecs[0]) = CodecSpec{{8}, {8}};
  Both both(f, 1);
  both.open();
  const int slot = both.slots[0], p = f.options.shape.page_size;
  REQUIRE(both.append(slot, 40) == Fit::ok);
  const auto apply = [&](const std::vector<std::int32_t>& list, auto fill) {
    const BothLists lists({test::PerHead(3, list)}, both.memory);
    Edits e(0);
    fill(e, lists.device);
    REQUIRE(both.cuda.apply(e.all(), {slot}).fit == Fit::ok);
  };
  // Page 3 (of 0 to 4) is on the host alone. It loses a token, and a token of a page on the device takes the place.
  apply({3}, [](Edits& e, const IndexList& l) { e.offload(PageList{l}); });
  apply({3}, [](Edits& e, const IndexList& l) { e.drop(Tier::device, PageList{l}); });
  apply({20, 26}, [](Edits& e, const IndexList& l) { e.evict(TokenList{l}); });
  both.cuda.check_invariants();
  const auto copy = both.cuda.copy_of(slot);
  for (int head = 0; head < 3; ++head) {
    CAPTURE(below, head);
    const auto tokens = test::stored_tokens(*copy, 0, 0, head);
    REQUIRE(tokens.size() == 38);
    CHECK(std::count_if(tokens.begin() + 3 * p, tokens.begin() + 4 * p,
                        [](const test::StoredToken& t) { return t.position >= 32; }) == 1);
    float inexact[2] = {0, 0};  // [tier]
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const bool host = static_cast<int>(i) / p == 3;
      CHECK(test::on(*copy, Tier::host, 0, 0, head, static_cast<int>(i) / p) == host);
      CHECK(test::on(*copy, Tier::device, 0, 0, head, static_cast<int>(i) / p) != host);
      const int at = tokens[i].position;
      auto key = f.row(0, 0, slot, head, at);
      ops::rotate(key.data(), f.options.rope_table, -((at > 20) + (at > 26)));
      for (std::size_t d = 0; d < key.size(); ++d)
        inexact[host] = std::max(inexact[host], std::abs(tokens[i].k[d] - key[d]));
    }
    // Keys lie in -4 to 4. They are rounded by half of a 255th of that range when they are stored and when they turn.
    CHECK(inexact[0] < (below ? 1e-5f : 0.08f));
    CHECK(inexact[1] < 0.08f);
    CHECK(inexact[1] > 1e-3f);
    // The page's summary covers its present keys.
    const float* bounds = reinterpret_cast<const float*>(copy->summaries(0).at(0, head, 3));
    for (std::size_t d = 0; d < tokens[0].k.size(); ++d) {
      float lo = INFINITY, hi = -INFINITY;
      for (int t = 3 * p; t < 4 * p; ++t) {
        const float x = tokens[static_cast<std::size_t>(t)].k[d];
        lo = std::min(lo, x), hi = std::max(hi, x);
      }
      CHECK(bounds[d] == lo);
      CHECK(bounds[tokens[0].k.size() + d] == hi);
    }
  }
}

TEST_CASE("cuda store: a step's token joins a page that crossed to another codec") {
  StoreFixture f = fixture(5);
  REQUIRE(f.options.summary == Summary::min_max);
  Both both(f, 1);
  both.open();
  const int slot = both.slots[0], p = f.options.shape.page_size;
  REQUIRE(both.append(slot, p + p / 2) == Fit::ok);
  const std::vector<test::PerHead> last{test::PerHead(3, {1})};
  both.apply({slot}, 0, last, [](Edits& e, const IndexList& l) { e.offload(PageList{l}); });
  both.apply({slot}, 0, last, [](Edits& e, const IndexList& l) { e.drop(Tier::device, PageList{l}); });
  if (GENERATE(true, false)) both.apply({slot}, 0, last, [](Edits& e, const IndexList& l) { e.recall(PageList{l}); });
  both.check();
  REQUIRE(both.step({slot}) == Fit::ok);
  both.check();
}

// A head loses in every step what it got. Text positions have gaps and lie out of order, and heads differ in length.
TEST_CASE("cuda store: the surplus that leaves a step is the CPU's, place by place") {
  struct Head {
    int tokens, page_size, kind;
  };
  const Head head = GENERATE(Head{300, 4, 0}, Head{90, 16, 7}, Head{70, 2, 1}, Head{4300, 16, 5}, Head{40, 16, 2},
                             Head{60, 8, 8}, Head{70, 16, 9});
  if (cases::quick() && head.tokens > 1000) return;
  StoreFixture f = fixture(head.kind);
  f.options.shape.page_size = head.page_size;
  f.options.shape.max_tokens = head.tokens + 40;
  const int columns = static_cast<int>(f.options.token_state.size());
  for (const auto by : {Both::age, Both::score, Both::column})
    for (const Pins pins : {Pins{}, Pins{4, 0}, Pins{0, 9}, Pins{3, head.tokens / 2}, Pins{2, head.tokens - 22}}) {
      if (by == Both::column && columns == 0) continue;
      CAPTURE(head.tokens, head.page_size, head.kind, static_cast<int>(by), pins.first, pins.last);
      Both both(f, 3);
      both.open();
      both.open();
      const std::vector<std::int32_t> rows{both.slots[1], both.slots[0]};
      for (const int slot : rows) REQUIRE(both.append(slot, head.tokens - 9 * slot) == Fit::ok);
      const std::vector<Pins> of_rows(2, pins);
      // First many leave, then one in each step. Later steps without pins leave gaps among the newest tokens.
      const auto keep = [&](std::size_t, int h) { return head.tokens - 20 - 5 * h; };
      for (int i = 0; i < 11; ++i) {
        CAPTURE(i);
        const bool pinned = i < 5 || i % 2 == 0;
        for (int layer = 0; layer < 2; ++layer)
          both.evict_surplus(rows, layer, by, pinned ? of_rows : std::vector<Pins>(), keep);
        if (i % 4 == 0) both.check();
        REQUIRE(both.step(rows) == Fit::ok);
      }
      both.check();
    }
}

// What a step's layers leave for its end. Layer 0 is evicted at once, because the policy leaves it out.
TEST_CASE("cuda store: the surplus of a graph's step leaves behind its layers, in one launch, as the CPU's does") {
  const int kind = GENERATE(0, 1, 4, 9, 11);
  StoreFixture f = fixture(kind);
  f.options.host_pages = f.options.pauses = false;
  Shape& s = f.options.shape;
  s.layers = 5, s.max_tokens = 90;
  for (const int column : {-1, f.options.token_state.empty() ? -1 : 0}) {
    CAPTURE(kind, column);
    Both both(f, 3);
    both.open();
    both.open();
    const std::vector<std::int32_t> rows{both.slots[1], both.slots[0]};
    for (const int slot : rows) REQUIRE(both.append(slot, 70 - 9 * slot) == Fit::ok);
    const auto n = static_cast<std::int64_t>(rows.size()), heads = std::int64_t{s.kv_heads};
    std::vector<std::int32_t> amounts;  // [layer][row, kv_head], of all layers
    for (int i = 0; i < s.layers * n * heads; ++i) amounts.push_back(48 + 3 * (i % 5));
    const std::vector<Pins> pins(2, {2, 5});
    OnDevice there;
    const std::int32_t* keep = there.put(amounts);
    const Pins* pins_there = there.put(pins);
    const auto apply = [&](int layer) {
      Surplus a, b;
      a.keep = View<const std::int32_t, 2>::dense(amounts.data() + layer * n * heads, {n, heads});
      b.keep = View<const std::int32_t, 2>::dense(keep + layer * n * heads, {n, heads});
      a.pins = pins.data(), b.pins = pins_there;
      a.column = b.column = column;
      Edits of_cpu(layer), of_cuda(layer);
      of_cpu.evict_surplus(a), of_cuda.evict_surplus(b);
      REQUIRE(both.cpu.apply(of_cpu.all(), rows, nullptr, true).fit == Fit::ok);
      REQUIRE(both.cuda.apply(of_cuda.all(), rows, nullptr, true).fit == Fit::ok);
    };
    const auto lengths = [&](int layer) { return both.memory.get(both.cuda.view(layer, rows).length); };
    for (int step = 0; step < 7; ++step) {
      CAPTURE(step);
      REQUIRE(both.step(rows) == Fit::ok);
      for (int layer = 0; layer < s.layers && column >= 0; ++layer) {
        const auto values = both.ranks(rows.size(), s.max_tokens);
        const auto view = View<const float, 3>::dense(values.data(), {n, heads, s.max_tokens});
        const PagedKv here = both.cpu.view(layer, rows), kv = both.cuda.view(layer, rows);
        ops::blend_state({&here, column}, 0, view, 1, Stream::cpu());
        OnDevice of_layer;
        ops::blend_state({&kv, column}, 0, of_layer.put(view), 1, both.memory.stream());
        both.memory.synchronize();
      }
      std::vector<std::vector<std::int32_t>> before;
      for (int layer = 0; layer < s.layers; ++layer) before.push_back(lengths(layer));
      test::JoinedLaunches launches;
      both.cuda.in_graph(true);
      for (int layer = 1; layer < s.layers; ++layer) apply(layer);
      CHECK(launches.evictions().empty());
      for (int layer = 0; layer < s.layers; ++layer) CHECK(lengths(layer) == before[static_cast<std::size_t>(layer)]);
      if (step == 3) {  // an exact answer, and then the same layer once more
        CHECK(both.cuda.length(2, rows[0], 1) == both.cpu.length(2, rows[0], 1));
        CHECK(launches.evictions() == std::vector<int>{4});
        apply(2);
      }
      if (step == 6) {  // places of what is left
        std::vector<test::PerHead> first(rows.size(), test::PerHead(static_cast<std::size_t>(heads), {0, 7}));
        both.apply(rows, 3, first, [](Edits& e, const IndexList& l) { e.evict(TokenList{l}); });
        CHECK(launches.evictions() == std::vector<int>{4});
      }
      if (step == 5) apply(3);  // a second one of a layer
      both.cuda.end_layers();
      CHECK(launches.evictions() == (step == 3 || step == 5 ? std::vector<int>{4, 1} : std::vector<int>{4}));
      both.cuda.end_layers();  // nothing waits
      both.cuda.in_graph(false);
      for (int layer = 1; layer < s.layers; ++layer) CHECK(lengths(layer) != before[static_cast<std::size_t>(layer)]);
      both.check();
    }
    test::JoinedLaunches launches;  // no graph holds the step
    apply(1);
    apply(2);
    CHECK(launches.evictions() == std::vector<int>{1, 1});
    both.check();
  }
}

TEST_CASE("cuda store: a surplus by scores, by scratch or beside a host tier leaves at once") {
  for (const int what : {0, 1, 2, 3, 4}) {
    CAPTURE(what);
    StoreFixture f = fixture(0);
    f.options.host_pages = what == 2, f.options.pauses = false;
    if (what == 3) f.options.rope = RopeRegime::re_rotate;
    Both both(f, 1);
    both.open();
    const std::vector<std::int32_t> rows{both.slots[0]};
    REQUIRE(both.append(rows[0], 30) == Fit::ok);
    OnDevice there;
    const std::vector<std::int32_t> amounts(2, 20);
    const auto scores = there.put(std::vector<float>(60, 1.f));
    both.cuda.in_graph(true);
    const test::JoinedLaunches launches;
    Surplus s;
    s.keep = View<const std::int32_t, 2>::dense(there.put(amounts), {1, 2});
    if (what == 1) {
      const auto scratch = take_scratch<std::int32_t>(both.cuda.workspace(), "keep", {1, 2});
      copy_memory(scratch.data, amounts.data(), 8, both.memory.stream());
      s.keep = scratch;
    }
    if (what == 0) s.scores = View<const float, 3>::dense(scores, {1, 2, 30});
    Edits e(1);
    e.evict_surplus(s);
    if (what == 4) e.evict_surplus(s);  // the first is not the callback's last edit
    REQUIRE(both.cuda.apply(e.all(), rows, nullptr, true).fit == Fit::ok);
    CHECK(launches.evictions() == std::vector<int>{1});
    both.cuda.end_layers();
    CHECK(launches.evictions() == std::vector<int>(what == 4 ? 2 : 1, 1));
    both.cuda.in_graph(false);
    CHECK(both.cuda.length(1, rows[0], 1) == 20);
  }
}

TEST_CASE("cuda store: NaN among the ranks of a surplus is noted with its place, on both devices") {
  const StoreFixture f = fixture(0);
  Both both(f, 1);
  both.open();
  const std::vector<std::int32_t> rows{both.slots[0]};
  REQUIRE(both.append(rows[0], 21) == Fit::ok);
  for (const int keep : {20, 12, 8, 12})  // one leaves, many leave, nothing leaves
    for (const bool by_column : {true, false}) {
      CAPTURE(keep, by_column);
      const int n = both.cpu.length(1, rows[0], 1);
      std::vector<float> values(static_cast<std::size_t>(2 * n), 1.f);
      for (const int t : {3, 7}) values[static_cast<std::size_t>(n + t)] = std::numeric_limits<float>::quiet_NaN();
      const auto view = View<const float, 3>::dense(values.data(), {1, 2, n});
      const std::vector<std::int32_t> amount(2, keep);
      OnDevice there;
      ops::Finding found[2];
      for (Store* store : {static_cast<Store*>(&both.cpu), static_cast<Store*>(&both.cuda)}) {
        const bool device = store->stream().device() == Device::cuda;
        Surplus s;
        s.keep = View<const std::int32_t, 2>::dense(amount.data(), {1, 2});
        if (device) s.keep = there.put(s.keep);
        const auto put = device ? there.put(view) : view;
        ops::Finding& of_store = found[device];
        ops::Finding* nan = device ? there.put(&of_store, 1) : &of_store;
        there.synchronize();
        const PagedKv kv = store->view(1, rows);
        s.column = by_column ? 0 : -1;
        if (by_column)
          ops::blend_state({&kv, 0}, 0, put, 1, store->stream());
        else
          s.scores = put;
        Edits e(1);
        e.evict_surplus(s);
        REQUIRE(store->apply(e.all(), rows, nan).fit == Fit::ok);
        synchronize(store->stream());
        if (device) of_store = there.get(View<const ops::Finding, 1>::dense(nan, {1}))[0];
      }
      CHECK(found[0].count == (keep < n ? 2u : 0u));
      CHECK(found[1].count == found[0].count);
      CHECK(found[1].first == found[0].first);
      for (int h = 0; h < 2; ++h)
        CHECK(both.cuda.positions_by_place(1, rows[0], h) == both.cpu.positions_by_place(1, rows[0], h));
    }
}

TEST_CASE("cuda store: page edits whose lists several blocks share") {
  StoreFixture f = fixture(4);
  f.options.shape.max_tokens = 1400;
  Both both(f, 1);
  both.open();
  const int slot = both.slots[0];
  REQUIRE(both.append(slot, 1390) == Fit::ok);
  const auto lists = both.some({slot}, 0, 9, true);
  REQUIRE(lists[0][0].size() > 256);  // one block takes 128
  const auto drop = [](Edits& e, const IndexList& l) { e.drop(Tier::device, PageList{l}); };
  both.apply({slot}, 0, lists, [](Edits& e, const IndexList& l) { e.offload(PageList{l}); });
  both.check();
  both.apply({slot}, 0, lists, drop);
  both.check();
  both.apply({slot}, 0, lists, [](Edits& e, const IndexList& l) { e.recall(PageList{l}); });
  both.check();
  both.apply({slot}, 0, lists, drop);
  REQUIRE(both.cpu.recall_all(0, slot) == Fit::ok);
  REQUIRE(both.cuda.recall_all(0, slot) == Fit::ok);
  both.check();
}

TEST_CASE("cuda store: what does not fit is a value and changes nothing") {
  for (int frames = 1; frames < 30; ++frames) {
    CAPTURE(frames);
    StoreFixture f = fixture(1);
    f.options.device_limit = frames * ops::make_layout(DType::bf16, {}, 8, 64, 0).bytes;
    Both both(f, 1);
    both.open();
    both.open();
    Fit fit = Fit::ok;
    for (int i = 0; i < 12 && fit == Fit::ok; ++i) {
      fit = i % 3 ? both.append(both.slots[static_cast<std::size_t>(i % 2)], 5) : both.step({both.slots[0]});
      both.cuda.check_invariants();
    }
    CHECK(fit == Fit::out_of_memory);
    both.close(both.slots[0]);
    both.close(both.slots[0]);
    both.cuda.check_invariants();
    CHECK(both.cuda.page_bytes(Tier::device) == 0);
  }
}

TEST_CASE("cuda store: lists that say what they must not are refused and change nothing") {
  const StoreFixture f = fixture(1);
  Both both(f, 1);
  both.open();
  REQUIRE(both.append(both.slots[0], 20) == Fit::ok);
  const auto refused = [&](const std::vector<std::int32_t>& list, auto fill) {
    const BothLists lists({test::PerHead(3, list)}, both.memory);
    Edits e(0);
    fill(e, lists.device);
    CHECK(both.cuda.apply(e.all(), both.slots).fit == Fit::ok);
    try {
      both.cuda.ledger();
      FAIL("not refused");
    } catch (const Error& error) {
      CHECK(error.code() == Errc::plugin);
    }
    both.check();
  };
  const auto keep = [](Edits& e, const IndexList& l) { e.evict_rest(TokenList{l}); };
  const auto evict = [](Edits& e, const IndexList& l) { e.evict(TokenList{l}); };
  refused({3, 2}, keep);
  refused({5, 5}, evict);
  refused({20}, keep);
  refused({-1, 4}, evict);
  refused({0, 1, 2}, [](Edits& e, const IndexList& l) { e.move(TokenList{l}); });
}

TEST_CASE("cuda store: an op that reads a page of the host alone is refused and writes nothing") {
  StoreFixture f = fixture(5);
  const Shape& s = f.options.shape;
  Both both(f, 1);
  both.open();
  both.open();
  const std::vector<std::int32_t> rows{both.slots[0]}, other{both.slots[1]};
  REQUIRE(both.append(rows[0], 20) == Fit::ok);
  const std::vector<test::PerHead> first_head{{{0, 1, 2}, {}, {}}};
  both.apply(rows, 1, first_head, [](Edits& e, const IndexList& l) { e.offload(PageList{l}); });
  both.apply(rows, 1, first_head, [](Edits& e, const IndexList& l) { e.drop(Tier::device, PageList{l}); });
  both.check();
  OnDevice there;
  const Stream stream = both.memory.stream();
  const auto scores = [&](std::int64_t heads) {
    return View<float, 3>::dense(there.take<float>(heads * s.max_tokens), {1, heads, s.max_tokens});
  };
  const std::vector<float> numbers(static_cast<std::size_t>(s.query_heads * s.max_tokens), 1.f);
  const auto ones = [&](std::int64_t heads, std::int64_t n) {
    return there.put(View<const float, 3>::dense(numbers.data(), {1, heads, n}));
  };
  const std::vector<std::int32_t> all(static_cast<std::size_t>(s.kv_heads), 9), seen{20};
  const std::vector<Pins> pins{{.first = 4}};
  TokenList kept;
  kept.index = View<std::int32_t, 3>::dense(there.take<std::int32_t>(s.kv_heads * 20), {1, s.kv_heads, 20});
  kept.count = View<std::int32_t, 2>::dense(there.take<std::int32_t>(s.kv_heads), {1, s.kv_heads});
  std::vector<std::uint8_t> flags(static_cast<std::size_t>(s.max_slots * s.kv_heads));
  for (int slot = 0; slot < s.max_slots; ++slot) flags[static_cast<std::size_t>(slot * s.kv_heads)] = 1;
  const auto marks = there.put(View<const std::uint8_t, 2>::dense(flags.data(), {s.max_slots, s.kv_heads}));
  const Heads first = Heads::flagged(marks), others = Heads::flagged(marks, false);
  PagedKv kv, below;
  const KvRows keys{&kv, KvSide::key}, values{&kv, KvSide::value};
  const StateColumn column{&kv, 0};
  struct Read {
    const char* what;
    std::function<void()> op;
    bool refused = true;
  };
  const std::vector<Read> reads = {
      {"row_norm", [&] { ops::row_norm(keys, scores(s.kv_heads), stream); }},
      {"row_norm of the head", [&] { ops::row_norm(keys, scores(s.kv_heads), stream, first); }},
      {"row_norm of the others", [&] { ops::row_norm(keys, scores(s.kv_heads), stream, others); }, false},
      {"row_norm of the host tier",
       [&] {
         ops::row_norm({&below, KvSide::key}, scores(s.kv_heads), stream);
       }},
      {"read_rows",
       [&] {
         const std::array<std::int64_t, 4> extent{1, s.kv_heads, s.max_tokens, s.head_dim};
         ops::read_rows(
             values,
             View<float, 4>::dense(there.take<float>(std::int64_t{s.kv_heads} * s.max_tokens * s.head_dim), extent),
             stream);
       }},
      {"row_dot", [&] { ops::row_dot(values, ones(s.query_heads, s.head_dim), scores(s.query_heads), stream); }},
      {"normalised_mean",
       [&] {
         ops::normalised_mean(keys,
                              View<float, 3>::dense(there.take<float>(std::int64_t{s.kv_heads} * s.head_dim),
                                                    {1, s.kv_heads, s.head_dim}),
                              stream);
       }},
      {"recency", [&] { ops::recency(kv, scores(s.kv_heads), stream); }},
      {"cluster_keys",
       [&] {
         const std::int64_t slots = s.max_slots, heads = s.kv_heads, dim = s.head_dim;
         KeyClusters c;
         c.centroid = View<float, 4>::dense(there.take<float>(slots * heads * 2 * dim), {slots, heads, 2, dim});
         c.size = View<std::int32_t, 3>::dense(there.take<std::int32_t>(slots * heads * 2), {slots, heads, 2});
         c.token = View<std::int32_t, 3>::dense(there.take<std::int32_t>(slots * heads * 20), {slots, heads, 20});
         c.bound = View<std::int32_t, 3>::dense(there.take<std::int32_t>(slots * heads * 2), {slots, heads, 2});
         ops::cluster_keys(kv, {{.tokens = 20, .clusters = 2}}, {.iterations = 1}, c, both.cuda.workspace(), stream);
       }},
      {"random_scores",
       [&] { ops::random_scores(kv, there.put(std::vector<std::uint64_t>{1}), scores(s.kv_heads), stream); }},
      {"layer_reduce",
       [&] { ops::layer_reduce(kv, ones(s.query_heads, s.max_tokens), GroupRule::mean, scores(s.kv_heads), stream); }},
      {"set_pinned", [&] { ops::set_pinned(kv, {.first = 4}, 0, scores(s.kv_heads), stream); }},
      {"top_tokens",
       [&] {
         ops::top_tokens(kv, ones(s.kv_heads, s.max_tokens),
                         there.put(View<const std::int32_t, 2>::dense(all.data(), {1, s.kv_heads})), there.put(pins),
                         kept, stream);
       }},
      {"window_votes",
       [&] {
         const std::vector<float> q(static_cast<std::size_t>(s.query_heads * 2 * s.head_dim), 1.f);
         ops::window_votes(
             Tensor<4>(there.put(View<const float, 4>::dense(q.data(), {1, s.query_heads, 2, s.head_dim}))),
             there.put(seen), kv, scores(s.query_heads), stream);
       }},
      {"query_counts", [&] { ops::query_counts(kv, there.put(seen), 5, scores(s.kv_heads), stream); }},
      {"keep_by_class",
       [&] {
         const TextTokens text{
             View<const std::int32_t, 2>::dense(there.take<std::int32_t>(s.max_slots), {s.max_slots, 1}), {}};
         const KeepRule rule;
         ops::keep_by_class(kv, text, ones(s.kv_heads, s.max_tokens), {},
                            there.put(View<const KeepRule, 2>::dense(&rule, {1, 1})), scores(s.kv_heads),
                            View<std::int32_t, 2>::dense(there.take<std::int32_t>(s.kv_heads), {1, s.kv_heads}),
                            stream);
       }},
      {"read_state", [&] { ops::read_state(column, scores(s.kv_heads), stream, first); }},
      {"add_mass", [&] { ops::add_mass(ones(s.query_heads, s.max_tokens), GroupRule::sum, column, stream, first); }},
      {"blend_state", [&] { ops::blend_state(column, 0, {}, 7, stream, first); }},
      {"page_sum", [&] { ops::page_sum(kv, ones(s.kv_heads, s.max_tokens), scores(s.kv_heads), stream); }, false}};
  for (const Read& read : reads) {
    CAPTURE(read.what);
    REQUIRE(both.step(other) == Fit::ok);  // after it the host's numbers are no longer exact
    kv = both.cuda.view(1, rows), below = both.cuda.view(1, rows, Tier::host);
    read.op();
    CHECK(reads_absent(both.cuda) == read.refused);
    both.check();
  }
}

TEST_CASE("cuda store: attention over a page of the host alone is refused, and a list of the store leaves it out") {
  const StoreFixture f = fixture(1);
  const Shape& s = f.options.shape;
  Both both(f, 1);
  both.open();
  const std::vector<std::int32_t> rows = both.slots;
  REQUIRE(both.append(rows[0], 40) == Fit::ok);
  const std::vector<test::PerHead> one{{{1}, {}, {}}};
  both.apply(rows, 0, one, [](Edits& e, const IndexList& l) { e.offload(PageList{l}); });
  both.apply(rows, 0, one, [](Edits& e, const IndexList& l) { e.drop(Tier::device, PageList{l}); });
  // The list of an edit becomes this one for the first head.
  const auto resolved = [&](const std::vector<std::int32_t>& list, auto fill) {
    const BothLists lists({test::PerHead(3, list)}, both.memory);
    Edits e(0);
    fill(e, lists.device);
    const IndexList got = both.cuda.resolve_attend(e.all()[0], rows, both.cuda.workspace());
    auto index = both.memory.get(got.index);
    index.resize(static_cast<std::size_t>(both.memory.get(got.count)[0]));
    both.cuda.workspace().reset();
    return index;
  };
  using Ints = std::vector<std::int32_t>;
  const auto pages = [](Edits& e, const IndexList& l) { e.attend(PageList{l}, {}); };
  const auto tokens = [](Edits& e, const IndexList& l) { e.attend(TokenList{l}, {}); };
  CHECK(resolved({0, 2, 4}, pages) == Ints{0, 2, 4});
  CHECK_FALSE(reads_absent(both.cuda));
  CHECK(resolved({0, 1, 4}, pages) == Ints{0, 4});
  CHECK(reads_absent(both.cuda));
  CHECK(resolved({7, 8, 15, 16}, tokens) == Ints{7, 16});
  CHECK(reads_absent(both.cuda));
  CHECK(resolved({4}, [](Edits& e, const IndexList& l) { e.attend(PageList{l}, {.first = 9}); }) == Ints{0, 4});
  CHECK(reads_absent(both.cuda));
  CHECK(resolved({0}, [](Edits& e, const IndexList& l) { e.attend_resident(PageList{l}, {}); }) == Ints{0, 2, 3, 4});
  CHECK_FALSE(reads_absent(both.cuda));

  // A list that score_pages made for this attention is read as it is.
  const std::int64_t most = s.max_pages(), heads = s.kv_heads;
  const std::vector<float> query(static_cast<std::size_t>(s.query_heads * s.head_dim), 1.f);
  const auto queries = both.memory.put(View<const float, 3>::dense(query.data(), {1, s.query_heads, s.head_dim}));
  const auto scores = View<float, 3>::dense(both.memory.take<float>(heads * most), {1, heads, most});
  PageList list;
  list.index = View<std::int32_t, 3>::dense(both.memory.take<std::int32_t>(heads * most), {1, heads, most});
  list.count = View<std::int32_t, 2>::dense(both.memory.take<std::int32_t>(heads), {1, heads});
  PageChoice all;
  all.budget = static_cast<int>(most);
  for (const bool captured : {false, true}) {
    list.final = both.cuda.final_list();
    ops::score_pages(queries, both.cuda.view(0, rows), both.cuda.summaries(0), all, scores, list, both.memory.stream());
    both.cuda.reserved(captured);
    Edits e(0);
    e.attend(list, {});
    REQUIRE(both.cuda.resolve_attend(e.all()[0], rows, both.cuda.workspace()).index.data == list.index.data);
    both.cuda.reserved(false);
    CHECK(reads_absent(both.cuda) == !captured);
  }

  for (const int layer : {0, 1}) {
    REQUIRE(both.step(rows) == Fit::ok);
    both.cuda.note_absent(layer, rows);
    CHECK(reads_absent(both.cuda) == (layer == 0));
  }
}

TEST_CASE("cuda store: options that it cannot serve are refused by name") {
  OnDevice device;
  const auto refused = [&](auto change, const std::string& text) {
    StoreFixture f;
    change(f.options);
    try {
      const CudaStore store(f.options, device.stream());
      FAIL("not refused");
    } catch (const Error& error) {
      CHECK(error.code() == Errc::unsupported);
      CHECK_THAT(error.what(), Catch::Contains(text));
    }
  };
  refused(
      [](StoreOptions& o) {
        o.codecs = {CodecSpec{}, CodecSpec{}}, o.host_pages = true;
      },
      "got two codecs with pages on the host");
  refused([](StoreOptions& o) { o.token_state.resize(6); }, "got 6 columns of token state, wanted at most 5");
}

TEST_CASE("cuda store: the ledger's peak is what a prompt held before it was compressed") {
  const StoreFixture f = fixture(1);
  Both both(f, 1);
  both.open();
  const int slot = both.slots[0];
  const auto k = both.tokens(0, 0, slot, 100, 0);
  OnDevice chunk;
  for (int layer = 0; layer < 2; ++layer) {
    both.cpu.append(layer, slot, k.data(), k.data(), 100, 0);
    const float* device = chunk.put(k.data(), k.size());
    both.cuda.append(layer, slot, device, device, DType::f32, std::int64_t{3} * 64, 100, 0);
    both.apply({slot}, layer, {test::PerHead(3, {1, 4, 50})},
               [](Edits& e, const IndexList& l) { e.evict_rest(TokenList{l}); });
  }
  CHECK(both.cuda.ledger().peak(Tier::device) == both.cpu.ledger().peak(Tier::device));
  CHECK(both.cuda.ledger().total(Tier::device) == both.cpu.ledger().total(Tier::device));
}
