#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <set>

#include "base/half.hpp"
#include "cases/place.hpp"
#include "ops/page/paged.hpp"
#include "ops/page/rope_append.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

struct Setup {
  int rows = 3, heads = 4, kv_heads = 2, dim = 64, page_size = 8, max_pages = 4, state_columns = 2;
  DType dtype = DType::bf16;
  CodecSpec codec;
  bool norm = false;
  std::vector<int> lengths = {0};  // [row, kv_head], cycled
  int frames = 64;                 // of the pool, besides those in use
  bool append = true;
  int mark_step = 1;
  std::optional<DType> rounded;  // type of the queries' 16-bit copy
};

// One token per row, appended on the device and compared with the same token written on the host.
struct Appended {
  Setup s;
  PageLayout layout;
  std::vector<float> qkv, cosine, sine, query_norm, key_norm;
  std::vector<std::int32_t> position, slots, free, length;
  std::vector<std::byte> arena;
  std::vector<PageEntry> table;
  // results of the call
  std::vector<float> got_qkv;
  std::vector<std::uint16_t> got_rounded;
  std::vector<std::byte> got_arena;
  std::vector<PageEntry> got_table;
  std::vector<std::int32_t> got_length;
  std::vector<std::int32_t> got_marks;  // [row], nonzero = not finite
  int error = -1, left = -1;

  static constexpr int angles = 300;
  std::int64_t stride() const { return std::int64_t{s.heads + 2 * s.kv_heads} * s.dim + 8; }
  std::size_t head_of(int row, int head) const {
    return static_cast<std::size_t>(slots[static_cast<std::size_t>(row)] * s.kv_heads + head);
  }

  explicit Appended(const Setup& setup, unsigned seed)
      : s(setup), layout(ops::make_layout(s.dtype, s.codec, s.page_size, s.dim, s.state_columns)) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    qkv.assign(static_cast<std::size_t>(s.rows * stride()), std::numeric_limits<float>::quiet_NaN());
    for (int r = 0; r < s.rows; ++r)
      for (std::int64_t i = 0; i < stride() - 8; ++i) qkv[static_cast<std::size_t>(r * stride() + i)] = normal(rng);
    for (int i = 0; i < s.dim; ++i) query_norm.push_back(normal(rng)), key_norm.push_back(normal(rng));
    for (int p = 0; p < angles; ++p)
      for (int i = 0; i < s.dim / 2; ++i) {
        const double angle = p * std::pow(10000.0, -2.0 * i / s.dim);
        cosine.push_back(static_cast<float>(std::cos(angle)));
        sine.push_back(static_cast<float>(std::sin(angle)));
      }
    for (int r = 0; r < s.rows; ++r) {
      position.push_back(static_cast<std::int32_t>(rng() % angles));
      slots.push_back(s.rows - 1 - r);
    }
    const int used = s.rows * s.kv_heads * s.max_pages, total = used + s.frames;
    arena.assign(static_cast<std::size_t>(total * layout.bytes), std::byte{0xA5});
    std::vector<std::int32_t> numbers;
    for (int f = 0; f < total; ++f) numbers.push_back(static_cast<std::int32_t>(f * layout.bytes / granule_bytes));
    std::shuffle(numbers.begin(), numbers.end(), rng);
    table.assign(static_cast<std::size_t>(used), PageEntry{});
    length.assign(static_cast<std::size_t>(s.rows * s.kv_heads), 0);
    for (int r = 0; r < s.rows; ++r)
      for (int h = 0; h < s.kv_heads; ++h) {
        const int n = s.lengths[static_cast<std::size_t>(r * s.kv_heads + h) % s.lengths.size()];
        length[head_of(r, h)] = n;
        for (int p = 0; p * s.page_size < n; ++p) {
          PageEntry& e = table[head_of(r, h) * static_cast<std::size_t>(s.max_pages) + static_cast<std::size_t>(p)];
          e.frame = numbers.back();
          numbers.pop_back();
          e.tokens = static_cast<std::uint16_t>(std::min(s.page_size, n - p * s.page_size));
        }
      }
    numbers.resize(static_cast<std::size_t>(s.frames));
    free = numbers;
  }

  void run() {
    OnDevice device;
    ops::RopeAppendArgs a;
    a.rows = s.rows, a.heads = s.heads, a.kv_heads = s.kv_heads, a.head_dim = s.dim;
    const auto x = View<float, 1>::dense(device.put(qkv.data(), qkv.size()), {static_cast<std::int64_t>(qkv.size())});
    a.qkv = x.data, a.qkv_stride = stride();
    if (s.norm) {
      a.query_norm = device.put(query_norm.data(), query_norm.size());
      a.key_norm = device.put(key_norm.data(), key_norm.size());
      a.eps = 1e-6f;
    }
    a.cosine = device.put(cosine.data(), cosine.size());
    a.sine = device.put(sine.data(), sine.size());
    a.angles = angles;
    a.position = device.put(position.data(), position.size());
    const auto frames =
        View<std::byte, 1>::dense(device.put(arena.data(), arena.size()), {static_cast<std::int64_t>(arena.size())});
    a.base = frames.data;
    a.layouts = &layout;
    a.table = View<PageEntry, 3>::dense(device.put(table.data(), table.size()), {s.rows, s.kv_heads, s.max_pages});
    a.length = View<std::int32_t, 2>::dense(device.put(length.data(), length.size()), {s.rows, s.kv_heads});
    a.slots = device.put(slots.data(), slots.size());
    const std::vector<std::uint16_t> poison(static_cast<std::size_t>(s.rows * s.heads * s.dim), 0xffff);
    const auto rounded = View<std::uint16_t, 1>::dense(device.put(poison.data(), poison.size()),
                                                       {static_cast<std::int64_t>(poison.size())});
    if (s.rounded) a.rounded = rounded.data, a.rounded_dtype = *s.rounded;
    a.append = s.append;
    const std::int32_t counts[] = {static_cast<std::int32_t>(free.size()), 0};
    const auto count = View<std::int32_t, 1>::dense(device.put(counts, 2), {2});
    a.pool = {device.put(free.data(), free.size()), count.data};
    a.error = count.data + 1;
    const std::vector<std::int32_t> unmarked(static_cast<std::size_t>(s.rows), 0);
    const auto marks = View<std::int32_t, 1>::dense(device.put(unmarked.data(), unmarked.size()), {s.rows});
    a.nonfinite = marks.data;
    a.nonfinite_step = s.mark_step;
    ops::rope_append(a, device.stream());
    got_qkv = device.get(x);
    got_rounded = device.get(rounded);
    got_arena = device.get(frames);
    got_table = device.get(a.table);
    got_length = device.get(a.length);
    got_marks = device.get(marks);
    left = device.get(count)[0];
    error = device.get(count)[1];
  }

  // The expected values of a head of a row after norm and rotation.
  std::vector<double> rotated(int row, int head) const {
    const float* x = qkv.data() + row * stride() + head * s.dim;
    const float* weight = head < s.heads ? query_norm.data() : key_norm.data();
    std::vector<double> y(x, x + s.dim);
    if (s.norm) {
      double sum = 0;
      for (const double v : y) sum += v * v;
      for (int i = 0; i < s.dim; ++i) y[static_cast<std::size_t>(i)] *= weight[i] / std::sqrt(sum / s.dim + 1e-6);
    }
    const int half = s.dim / 2, at = position[static_cast<std::size_t>(row)];
    std::vector<double> out(y);
    for (int i = 0; i < half; ++i) {
      const double c = cosine[static_cast<std::size_t>(at * half + i)],
                   n = sine[static_cast<std::size_t>(at * half + i)], a = y[static_cast<std::size_t>(i)],
                   b = y[static_cast<std::size_t>(half + i)];
      out[static_cast<std::size_t>(i)] = a * c - b * n;
      out[static_cast<std::size_t>(half + i)] = b * c + a * n;
    }
    return out;
  }
};

// Compares queries and keys with the reference. Values and the gaps between rows must be unchanged.
void check_heads(const Appended& a) {
  const Setup& s = a.s;
  int bad = 0;
  std::string first;
  for (int r = 0; r < s.rows; ++r)
    for (std::int64_t i = 0; i < a.stride(); ++i) {
      const std::size_t at = static_cast<std::size_t>(r * a.stride() + i);
      const int head = static_cast<int>(i / s.dim), d = static_cast<int>(i % s.dim);
      if (head < s.heads + s.kv_heads) {
        const double wanted = a.rotated(r, head)[static_cast<std::size_t>(d)];
        if (!(std::abs(a.got_qkv[at] - wanted) <= 2e-6 * (1 + std::abs(wanted)) * 8) && !bad++)
          first = "row " + std::to_string(r) + " head " + std::to_string(head) + " element " + std::to_string(d) +
                  ": got " + std::to_string(a.got_qkv[at]) + ", wanted " + std::to_string(wanted);
      } else if (std::memcmp(&a.got_qkv[at], &a.qkv[at], 4) != 0 && !bad++) {
        first = "row " + std::to_string(r) + " value " + std::to_string(i) + " changed";
      }
    }
  INFO(bad << " queries, keys or values are wrong, first " << first);
  CHECK(bad == 0);
  if (!s.rounded) return;
  int differ = 0;
  for (int r = 0; r < s.rows; ++r)
    for (int i = 0; i < s.heads * s.dim; ++i) {
      const float x = a.got_qkv[static_cast<std::size_t>(r * a.stride() + i)];
      const std::uint16_t wanted = *s.rounded == DType::f16 ? float_to_half(x) : bf16(x).bits;
      differ += a.got_rounded[static_cast<std::size_t>(r * s.heads * s.dim + i)] != wanted;
    }
  CHECK(differ == 0);
}

void check_all(const Setup& s, unsigned seed) {
  Appended a(s, seed);
  CAPTURE(s.rows, s.heads, s.kv_heads, s.dim, s.page_size, name_of(s.dtype), int{s.codec.k.bits}, int{s.codec.v.bits},
          s.norm, seed);
  a.run();
  REQUIRE(a.error == 0);
  check_heads(a);

  // Tables, lengths and frames must equal, byte for byte, the result of write_token for the same key and value.
  std::set<std::int32_t> pool(a.free.begin(), a.free.end());
  std::vector<std::byte> arena = a.arena;
  std::vector<PageEntry> table = a.table;
  int taken = 0;
  for (int r = 0; r < s.rows; ++r)
    for (int h = 0; h < s.kv_heads; ++h) {
      CAPTURE(r, h);
      const int n = a.length[a.head_of(r, h)], page = n / s.page_size, offset = n % s.page_size;
      CHECK(a.got_length[a.head_of(r, h)] == n + 1);
      const std::size_t at = a.head_of(r, h) * static_cast<std::size_t>(s.max_pages) + static_cast<std::size_t>(page);
      const PageEntry& e = a.got_table[at];
      CHECK(e.tokens == offset + 1);
      CHECK(e.codec == 0);
      if (offset == 0) {
        ++taken;
        CHECK(pool.erase(e.frame) == 1);  // the frame comes from the pool, once
        REQUIRE(e.frame >= 0);
      } else {
        REQUIRE(e.frame == table[at].frame);
      }
      table[at] = e;
      const float* k = a.got_qkv.data() + r * a.stride() + (s.heads + h) * s.dim;
      const float* v = k + s.kv_heads * s.dim;
      ops::write_token(arena.data() + std::int64_t{e.frame} * granule_bytes, a.layout, offset, k, v,
                       a.position[static_cast<std::size_t>(r)]);
    }
  CHECK(a.left == s.frames - taken);
  CHECK(std::memcmp(table.data(), a.got_table.data(), table.size() * sizeof(PageEntry)) == 0);
  std::size_t different = 0, where = 0;
  for (std::size_t i = 0; i < arena.size(); ++i)
    if (arena[i] != a.got_arena[i] && !different++) where = i;
  const std::int64_t in_frame = static_cast<std::int64_t>(where) % a.layout.bytes;
  INFO(different << " bytes of the cache differ, first at " << in_frame << " of a frame with k " << a.layout.k << " v "
                 << a.layout.v << " k_meta " << a.layout.k_meta << " v_meta " << a.layout.v_meta << " positions "
                 << a.layout.positions << " state " << a.layout.state);
  CHECK(different == 0);
}

void unchanged(const Appended& a) {
  CHECK(a.got_length == a.length);
  CHECK(a.got_arena == a.arena);
  CHECK(std::memcmp(a.table.data(), a.got_table.data(), a.table.size() * sizeof(PageEntry)) == 0);
  CHECK(a.left == static_cast<int>(a.free.size()));
}

}  // namespace

TEST_CASE("cuda rope_append writes what write_token writes") {
  unsigned seed = 1;
  for (const int dim : {8, 64, 80, 96, 128, 256})
    for (const int page : {1, 8, 16})
      for (const bool norm : {false, true})
        for (const int kind : {0, 1, 2, 3, 4}) {
          Setup s;
          s.dim = dim, s.page_size = page, s.norm = norm;
          s.max_pages = 1 + 40 / page;
          s.dtype = kind == 0 ? DType::f32 : kind == 4 ? DType::f16 : DType::bf16;
          if (kind == 2) s.codec = {{8}, {8}};
          if (kind == 3) s.codec = {{8}, {0}};
          s.heads = seed % 2 ? 4 : 6, s.kv_heads = seed % 3 ? 2 : 1;
          s.lengths = {0, 1, page - 1, page, 2 * page + 1, 17};
          s.rows = 4;
          if (seed % 4 == 0) s.rounded = seed % 8 ? DType::bf16 : DType::f16;
          check_all(s, seed++);
        }
  Setup many;
  many.rows = 40, many.heads = 32, many.kv_heads = 8, many.dim = 128, many.page_size = 16, many.max_pages = 3;
  many.lengths = {16, 0, 32, 7};
  many.frames = 320;
  check_all(many, seed);
}

TEST_CASE("cuda rope_append without appending turns a prompt's queries and keys and leaves the cache as it was") {
  unsigned seed = 1000;
  for (const int dim : {8, 64, 80, 96, 128, 256})
    for (const auto& [heads, kv_heads] : std::vector<std::pair<int, int>>{{4, 2}, {7, 1}, {2, 2}, {9, 3}, {5, 0}})
      for (const bool norm : {false, true}) {
        Setup s;
        s.dim = dim, s.heads = heads, s.kv_heads = kv_heads, s.norm = norm;
        s.rows = 37;
        s.append = false;
        if (seed % 3) s.rounded = seed % 3 == 1 ? DType::bf16 : DType::f16;
        CAPTURE(dim, heads, kv_heads, norm, seed);
        Appended a(s, seed++);
        a.run();
        CHECK(a.error == 0);
        check_heads(a);
        unchanged(a);
      }
  Setup s;
  s.append = false;
  s.rounded = DType::bf16;
  Appended a(s, seed);
  a.position[1] = -1;
  a.run();
  CHECK(a.error == ops::append_no_angle);
  const auto row = [&](const std::vector<float>& of, int r) {
    const auto begin = of.begin() + r * a.stride();
    return std::vector<float>(begin, begin + a.stride() - 8);
  };
  CHECK(row(a.got_qkv, 1) == row(a.qkv, 1));
  CHECK(row(a.got_qkv, 2) != row(a.qkv, 2));
  unchanged(a);
}

TEST_CASE("cuda rope_append marks the rows with numbers that are not finite") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  using Marks = std::vector<std::int32_t>;
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const CodecSpec codec : {CodecSpec{}, CodecSpec{{8}, {8}}})
      for (const bool append : {true, false}) {
        Setup s;
        s.rows = 4, s.dtype = dtype, s.codec = codec, s.append = append;
        CAPTURE(name_of(dtype), int{codec.k.bits}, append);
        const auto marks = [&](int row, int head, int element, float value) {
          Appended a(s, 3);
          if (head >= 0) a.qkv[static_cast<std::size_t>(row * a.stride() + head * s.dim + element)] = value;
          a.run();
          REQUIRE(a.error == 0);
          return a.got_marks;
        };
        CHECK(marks(0, -1, 0, 0) == Marks{0, 0, 0, 0});
        const int key = s.heads, value = s.heads + s.kv_heads;
        for (const float bad : {nan, inf, -inf}) {
          CAPTURE(bad);
          CHECK(marks(0, 0, 0, bad) == Marks{1, 0, 0, 0});
          CHECK(marks(2, s.heads - 1, s.dim - 1, bad) == Marks{0, 0, 1, 0});
          CHECK(marks(3, key, 0, bad) == Marks{0, 0, 0, 1});
          CHECK(marks(1, key + s.kv_heads - 1, s.dim / 2, bad) == Marks{0, 1, 0, 0});
          if (append) CHECK(marks(3, value, s.dim - 1, bad) == Marks{0, 0, 0, 1});
          if (append) CHECK(marks(1, value + s.kv_heads - 1, 0, bad) == Marks{0, 1, 0, 0});
        }
        // 65519 stays finite in f16, -65520 is rounded to infinity.
        if (append) CHECK(marks(1, value, 5, 65519.f) == Marks{0, 0, 0, 0});
        if (append) CHECK(marks(1, value, 5, -65520.f) == Marks{0, dtype == DType::f16, 0, 0});
        CHECK(marks(1, 0, 5, 65520.f) == Marks{0, 0, 0, 0});  // a query is not cached
        s.mark_step = 0;
        CHECK(marks(2, key, 0, nan) == Marks{1, 0, 0, 0});
      }
}

TEST_CASE("cuda rope_append says why a token does not fit and leaves the cache as it was") {
  Setup s;
  s.rows = 1, s.kv_heads = 1, s.heads = 1;
  SECTION("no frame") {
    s.frames = 0;
    Appended a(s, 1);
    a.run();
    CHECK(a.error == ops::append_no_frame);
    unchanged(a);
  }
  SECTION("fewer frames than heads: some fit") {
    s.rows = 20, s.frames = 5;
    Appended a(s, 1);
    a.run();
    CHECK(a.error == ops::append_no_frame);
    CHECK(a.left == 0);
    int longer = 0;
    for (const int n : a.got_length) longer += n;
    CHECK(longer == 5);
  }
  SECTION("a full table") {
    s.lengths = {32};
    Appended a(s, 1);
    a.run();
    CHECK(a.error == ops::append_no_page);
    unchanged(a);
  }
  SECTION("a position without angles") {
    Appended a(s, 1);
    a.position[0] = Appended::angles;
    a.run();
    CHECK(a.error == ops::append_no_angle);
    unchanged(a);
  }
  SECTION("the newest page is elsewhere") {
    s.lengths = {3};
    Appended a(s, 1);
    a.table[0].frame = null_frame;
    a.run();
    CHECK(a.error == ops::append_page_absent);
    unchanged(a);
  }
}
