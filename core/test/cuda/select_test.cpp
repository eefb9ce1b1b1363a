#include <catch2/catch.hpp>
#include <kvlab/ops.hpp>

#include <cmath>
#include <limits>

#include "ops/score/reference.hpp"
#include "ops/select/reference.hpp"
#include "support/device_cache.hpp"
#include "support/paged_fixture.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Ints = std::vector<std::int32_t>;

// Tables of a cache. Nobody reads its pages.
struct Lengths {
  Ints length, slots;
  std::vector<PageEntry> table;
  std::vector<std::byte> frame = std::vector<std::byte>(granule_bytes);
  PageLayout layout;
  PagedKv kv;

  Lengths(int rows, int heads, int most, int page_size, const Ints& tokens) : length(tokens) {
    for (int r = 0; r < rows; ++r) slots.push_back(r);
    const int pages = (most + page_size - 1) / page_size;
    table.resize(static_cast<std::size_t>(rows * heads * pages));
    kv.base = frame.data();
    kv.layouts = &layout;
    kv.table = View<const PageEntry, 3>::dense(table.data(), {rows, heads, pages});
    kv.length = View<const std::int32_t, 2>::dense(length.data(), {rows, heads});
    kv.slots = slots.data();
    kv.rows = rows, kv.kv_heads = heads, kv.head_dim = 64, kv.page_size = page_size;
  }
  Lengths(const Lengths&) = delete;
};

// A list with poison around its entries.
struct Lists {
  Ints index, count;
  IndexList list;
  Lists(int rows, int heads, int room)
      : index(static_cast<std::size_t>(rows * heads * room), -7), count(static_cast<std::size_t>(rows * heads), -7) {
    list.index = View<std::int32_t, 3>::dense(index.data(), {rows, heads, room});
    list.count = View<std::int32_t, 2>::dense(count.data(), {rows, heads});
  }
};

// Empty if equal, else the first difference.
std::string difference(const Lists& expected, const Ints& index, const Ints& count) {
  const auto room = static_cast<std::size_t>(expected.list.index.extent[2]);
  for (std::size_t i = 0; i < count.size(); ++i) {
    const std::string where = "list " + std::to_string(i) + ": ";
    if (count[i] != expected.count[i])
      return where + "got " + std::to_string(count[i]) + " entries, wanted " + std::to_string(expected.count[i]);
    for (std::size_t k = 0; k < room; ++k)
      if (index[i * room + k] != expected.index[i * room + k])
        return where + "got entry " + std::to_string(k) + " = " + std::to_string(index[i * room + k]) + ", wanted " +
               std::to_string(expected.index[i * room + k]) + " of " + std::to_string(count[i]) + " entries";
  }
  return "";
}

const char* const kinds[] = {"normal",  "equal",   "few values", "one outlier", "wide exponents", "rising",
                             "falling", "special", "tiny",       "all NaN",     "infinities"};

float value_of(int kind, int i, int n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  const float special[] = {-0.f, 0.f, INFINITY, -INFINITY, NAN, 1.f, -1.f, 1e-40f, -1e-40f};
  switch (kind) {
    case 0: return normal(rng);
    case 1: return 3.f;
    case 2: return static_cast<float>(rng() % 5);
    case 3: return i == n / 3 ? 1e30f : normal(rng) * 1e-3f;
    case 4: return normal(rng) * std::exp2(static_cast<float>(static_cast<int>(rng() % 200) - 100));
    case 5: return static_cast<float>(i) - static_cast<float>(n) / 2;
    case 6: return static_cast<float>(-i / 2);
    case 7: return rng() % 3 ? special[rng() % 9] : static_cast<float>(rng() % 5);
    case 8: return normal(rng) * 1e-42f;
    case 9: return NAN;
    default:
      return rng() % 2 ? std::numeric_limits<float>::max() : rng() % 2 ? -std::numeric_limits<float>::max() : INFINITY;
  }
}

// Compares both selections over rows of these lengths, with ragged budgets and every kind of scores.
void compare_rows(const Ints& lengths, unsigned seed) {
  const int rows = static_cast<int>(lengths.size()) / 2, heads = 2;
  const int most = *std::max_element(lengths.begin(), lengths.end());
  std::mt19937 rng(seed);
  const Lengths of_tokens(rows, heads, most, 16, lengths);
  const int room = static_cast<int>(of_tokens.kv.table.extent[2]) * 16;
  Ints page_tokens;
  for (const int n : lengths) page_tokens.push_back(n * 4 - (n ? n % 4 : 0));  // n pages of 4 tokens
  const Lengths of_pages(rows, heads, most * 4, 4, page_tokens);
  OnDevice device;
  const PagedKv device_tokens = device.put(of_tokens.kv, of_tokens.frame.size()),
                device_pages = device.put(of_pages.kv, of_pages.frame.size());
  for (int kind = 0; kind < 11; ++kind) {
    CAPTURE(most, kinds[kind]);
    std::vector<float> scores(static_cast<std::size_t>(rows * heads * room), 1e38f);
    const auto view = View<float, 3>::dense(scores.data(), {rows, heads, room});
    for (int r = 0; r < rows; ++r)
      for (int h = 0; h < heads; ++h) {
        const int n = lengths[static_cast<std::size_t>(r * heads + h)];
        for (int i = 0; i < n; ++i) view(r, h, i) = value_of(kind, i, n, rng);
      }
    const auto device_scores = device.put(view);
    for (int budget = 0; budget < 4; ++budget) {
      Ints keep;
      for (const int n : lengths)
        keep.push_back(budget == 0   ? static_cast<int>(rng() % 5) - 1
                       : budget == 1 ? n / 4
                       : budget == 2 ? n - static_cast<int>(rng() % 4) + 1
                                     : static_cast<int>(rng() % static_cast<unsigned>(n + 2)));
      CAPTURE(budget);
      const auto wanted = View<const std::int32_t, 2>::dense(keep.data(), {rows, heads});
      const auto device_wanted = device.put(wanted);
      {
        Lists expected(rows, heads, room);
        const TokenList list = device.put(TokenList{expected.list});
        ops::top_pages_reference(of_pages.kv, view, wanted, {}, PageList{expected.list});  // reads no page
        ops::top_tokens(device_tokens, device_scores, device_wanted, nullptr, list, device.stream());
        INFO("top_tokens");
        CHECK(difference(expected, device.get(list.index), device.get(list.count)) == "");
      }
      for (const bool newest : {false, true}) {
        Lists expected(rows, heads, room);
        const PageList list = device.put(PageList{expected.list});
        ops::top_pages_reference(of_pages.kv, view, wanted, {0, 0, newest}, PageList{expected.list});
        ops::top_pages(device_pages, device_scores, device_wanted, {0, 0, newest}, list, device.stream());
        INFO("top_pages, newest page pinned: " << newest);
        CHECK(difference(expected, device.get(list.index), device.get(list.count)) == "");
      }
    }
  }
}

}  // namespace

TEST_CASE("cuda selection of short rows: around the sizes of warps, words and candidate lists") {
  compare_rows({0, 1, 2, 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 300, 511, 513}, 1);
}

TEST_CASE("cuda selection of rows in registers: every block size") {
  compare_rows({2048, 2047, 640, 1000}, 2);
  compare_rows({8192, 2049, 5000, 1}, 3);
  compare_rows({14336, 14335}, 4);
}

TEST_CASE("cuda selection of rows in shared memory") { compare_rows({20000, 16385}, 6); }

TEST_CASE("cuda selection of rows that stay in global memory") { compare_rows({40000, 70001}, 5); }

TEST_CASE("cuda selection equals its reference: pins by text position, on caches of every kind") {
  for (unsigned n = 0; n < 120; ++n) {
    CAPTURE(n);
    RandomCache c(n);
    const PagedKv kv = c.cache.view();
    const float special[] = {-0.f, 0.f, INFINITY, -INFINITY, NAN, 1.f, -1.f, 1e-40f, -1e-40f};
    auto scores = c.normal(std::int64_t{c.rows()} * c.kv_heads() * c.room());
    for (float& x : scores)
      if (n % 2) x = c.rng() % 3 ? special[c.rng() % 9] : static_cast<float>(c.rng() % 5);
    const auto of = View<float, 3>::dense(scores.data(), {c.rows(), c.kv_heads(), c.room()});
    std::vector<Pins> pins(static_cast<std::size_t>(c.rows()));
    for (Pins& p : pins)
      p = {static_cast<int>(c.rng() % 5), static_cast<int>(c.rng() % (n % 7 ? 9 : 90)), c.rng() % 2 == 0};
    Ints amount(static_cast<std::size_t>(c.rows() * c.kv_heads()));
    for (auto& a : amount) a = static_cast<int>(c.rng() % static_cast<unsigned>(c.room() + 5));
    if (n % 5 == 0)  // a decode step: one token of each head leaves
      for (int r = 0; r < c.rows(); ++r)
        for (int h = 0; h < c.kv_heads(); ++h)
          amount[static_cast<std::size_t>(r * c.kv_heads() + h)] = std::max(0, kv.tokens(r, h) - 1);
    const auto keep = View<const std::int32_t, 2>::dense(amount.data(), {c.rows(), c.kv_heads()});
    OnDevice device;
    const PagedKv device_kv = device.put(kv, c.cache.arena_bytes());
    const auto device_of = device.put(of);
    const auto device_keep = device.put(keep);
    const Pins* device_pins = device.put(pins.data(), pins.size());
    for (const bool pinned : {false, true}) {
      CAPTURE(pinned);
      Lists expected(c.rows(), c.kv_heads(), c.room());
      const TokenList list = device.put(TokenList{expected.list});
      ops::top_tokens_reference(kv, of, keep, pinned ? pins.data() : nullptr, TokenList{expected.list});
      ops::top_tokens(device_kv, device_of, device_keep, pinned ? device_pins : nullptr, list, device.stream());
      CHECK(difference(expected, device.get(list.index), device.get(list.count)) == "");
    }
  }
}

TEST_CASE("cuda top_tokens: pins of a long head out of text order, equal positions together") {
  PagedFixture cache({1, 1, 8, 16, 64});
  std::mt19937 rng(3);
  Ints position(1000);
  for (std::size_t i = 0; i < position.size(); ++i) position[i] = static_cast<int>(i) / 2 * 70000;
  std::shuffle(position.begin(), position.end(), rng);
  const std::vector<float> x(8, 0.f);
  for (const int p : position) cache.append(0, 0, x, x, p);
  std::vector<float> scores(1000);
  for (float& s : scores) s = static_cast<float>(rng() % 100);
  const auto of = View<float, 3>::dense(scores.data(), {1, 1, 1000});
  OnDevice device;
  const PagedKv kv = device.put(cache.view(), cache.arena_bytes());
  const auto device_of = device.put(of);
  for (const Pins pins : {Pins{1, 0}, Pins{0, 1}, Pins{3, 5}, Pins{4, 300}, Pins{499, 500}, Pins{600, 600}})
    for (const int keep : {0, 10, 400, 999, 1000}) {
      CAPTURE(pins.first, pins.last, keep);
      const auto wanted = View<const std::int32_t, 2>::dense(&keep, {1, 1});
      Lists expected(1, 1, 1010);
      const TokenList list = device.put(TokenList{expected.list});
      ops::top_tokens_reference(cache.view(), of, wanted, &pins, TokenList{expected.list});
      ops::top_tokens(kv, device_of, device.put(wanted), device.put(&pins, 1), list, device.stream());
      CHECK(difference(expected, device.get(list.index), device.get(list.count)) == "");
    }
}

TEST_CASE("cuda allotments equal their references") {
  for (unsigned n = 0; n < 120; ++n) {
    CAPTURE(n);
    RandomCache c(n);
    LayerKv kv;
    kv.pages = c.cache.view();
    auto scores = c.normal(std::int64_t{c.rows()} * c.kv_heads() * c.room());
    if (n % 2)
      for (float& x : scores) x = static_cast<float>(c.rng() % 7);
    std::vector<Pins> pins(static_cast<std::size_t>(c.rows()));
    Ints total, length;
    for (int r = 0; r < c.rows(); ++r) {
      pins[static_cast<std::size_t>(r)] = {static_cast<int>(c.rng() % 3), static_cast<int>(c.rng() % 3)};
      total.push_back(static_cast<int>(c.rng() % 60));
      for (int h = 0; h < c.kv_heads(); ++h) length.push_back(kv.pages.tokens(r, h));
    }
    Ints keep(length.size(), -7);
    Allotment a;
    a.scores = View<float, 3>::dense(scores.data(), {c.rows(), c.kv_heads(), c.room()});
    a.length = View<const std::int32_t, 2>::dense(length.data(), {c.rows(), c.kv_heads()});
    a.pins = n % 3 ? pins.data() : nullptr;
    a.total = total.data();
    a.keep = View<std::int32_t, 2>::dense(keep.data(), {c.rows(), c.kv_heads()});
    a.kv = &kv;
    OnDevice device;
    LayerKv device_kv = kv;
    device_kv.pages = device.put(kv.pages, c.cache.arena_bytes());
    Allotment b = a;
    b.scores = device.put(a.scores);
    b.length = device.put(a.length);
    if (a.pins) b.pins = device.put(a.pins, pins.size());
    b.total = device.put(a.total, total.size());
    b.keep = device.put(a.keep);
    b.kv = &device_kv;
    const double floor = static_cast<double>(c.rng() % 11) / 10;
    CAPTURE(floor);
    for (const bool exact : {false, true}) {
      CAPTURE(exact);
      ops::allot_by_score_reference(a, floor, exact);
      ops::allot_by_score(b, floor, exact, device.stream());
      CHECK(device.get(b.keep) == keep);
    }
    ops::allot_uniform_reference(a);
    ops::allot_uniform(b, device.stream());
    CHECK(device.get(b.keep) == keep);
    std::reverse(total.begin(), total.end());
    ops::allot_tokens_reference(a, total.data());
    ops::allot_tokens(b, device.put(total.data(), total.size()), device.stream());
    CHECK(device.get(b.keep) == keep);
  }
}
