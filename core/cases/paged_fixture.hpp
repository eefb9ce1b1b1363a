// A small paged cache in memory for tests. Frames lie in scattered order with guard bytes between them, and rows map to
// slots in reverse. So code that mixes up rows, slots, frames or pages fails.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/workspace.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/half.hpp"
#include "ops/page/codes.hpp"
#include "ops/page/paged.hpp"

namespace kvlab::cases {

struct PagedOptions {
  int rows = 1, kv_heads = 1, head_dim = 16, page_size = 4, max_pages = 16;
  DType dtype = DType::f32;
  CodecSpec codec = {};
  int state_columns = 0;
  RopeRegime rope = RopeRegime::original;
  int frames = 0;  // of all heads together; 0 = max_pages for each head
};

// The formats of codes.
inline constexpr CodecSide fp8{8, CodeKind::e4m3}, whole4{4, CodeKind::whole_zero};
inline constexpr CodecSide sides_with_codes[] = {{2}, {4}, {8}, fp8};
// Codecs in which every format stands on either side, beside each other format or rows without codes.
inline constexpr CodecSpec codecs_with_codes[] = {{{8}, {8}}, {{8}, {4}}, {{4}, {2}}, {fp8, fp8},      {{2}, {4}},
                                                  {{}, {8}},  {{4}, {}},  {{4}, fp8}, {fp8, {2}},      {{8}, {}},
                                                  {{4}, {4}}, {{4}, {8}}, {{2}, {2}}, {whole4, whole4}};
// The codec, with 4 bits instead of 2 where a head has no whole words of these.
constexpr CodecSpec fitting(CodecSpec codec, int head_dim) {
  for (CodecSide* side : {&codec.k, &codec.v})
    if (side->bits == 2 && head_dim % 16) side->bits = 4;
  return codec;
}

// A side's format in a case's name. plain: that of a side without codes.
inline std::string format_of(CodecSide side, const std::string& plain) {
  if (!side.bits) return plain;
  std::string name = side.kind == CodeKind::e4m3 ? "fp8" : "int" + std::to_string(side.bits);
  if (side.kind == CodeKind::whole_zero) name += " with a whole zero";
  if (side.axis == CodeAxis::channel) name += " by channel";
  return side.group ? name + " in groups of " + std::to_string(side.group) : name;
}

// Random rows, of which each may be cut to a head's size. The same ones in every call.
inline constexpr std::size_t widest_row = 256;
const std::vector<float>& row_pool();
// Numbers uniform in [-1, 1), the same ones in every call.
std::vector<float> randoms(std::int64_t count);
// Normally distributed numbers, made fast.
std::vector<float> normals(std::int64_t count, unsigned seed);

class PagedFixture {
 public:
  static constexpr std::byte guard{0xA5};

  explicit PagedFixture(const PagedOptions& options) : options_(options) {
    layouts_.push_back(
        ops::make_layout(options.dtype, options.codec, options.page_size, options.head_dim, options.state_columns));
    const int heads = options.rows * options.kv_heads;
    const int frames = options.frames ? options.frames : heads * options.max_pages;
    frame_step_ = layouts_[0].bytes + granule_bytes;  // one granule of guard behind every frame
    arena_.assign(frames * frame_step_ + granule_bytes, guard);
    const auto address = reinterpret_cast<std::uintptr_t>(arena_.data());
    aligned_ = arena_.data() + (granule_bytes - address % granule_bytes) % granule_bytes;
    for (int f = 0; f < frames; ++f) free_.push_back(static_cast<std::int32_t>(f * frame_step_ / granule_bytes));
    std::shuffle(free_.begin(), free_.end(), std::mt19937(7));
    table_.assign(heads * std::size_t(options.max_pages), PageEntry{});
    length_.assign(heads, 0);
    lower_pages_.assign(heads, 0);
    for (int r = 0; r < options.rows; ++r) slots_.push_back(options.rows - 1 - r);
    for (int i = 0; i < options.head_dim / 2; ++i)
      inv_freq_.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / options.head_dim)));
  }

  // Appends one token to a head. Its text position is the next one unless given. k, v: head_dim values.
  void append(int row, int head, const std::vector<float>& k, const std::vector<float>& v, int position = -1) {
    const int slot = slots_[row];
    std::int32_t& n = length_[slot * options_.kv_heads + head];
    const int page = n / options_.page_size, offset = n % options_.page_size;
    PageEntry& e = table_[(slot * options_.kv_heads + head) * options_.max_pages + page];
    if (offset == 0) {
      e.frame = free_.back();
      free_.pop_back();
    }
    e.tokens = static_cast<std::uint16_t>(offset + 1);
    ops::write_token(aligned_ + std::int64_t{e.frame} * granule_bytes, layouts_[0], offset, k.data(), v.data(),
                     position < 0 ? n : position);
    ++n;
  }

  // Appends `tokens` tokens whose keys and values are normally distributed.
  void fill_random(int row, int head, int tokens, std::mt19937& rng, float spread = 1.f) {
    std::normal_distribution<float> normal(0.f, spread);
    std::vector<float> k(options_.head_dim), v(options_.head_dim);
    for (int t = 0; t < tokens; ++t) {
      for (float& x : k) x = normal(rng);
      for (float& x : v) x = normal(rng);
      append(row, head, k, v);
    }
  }

  // Appends tokens to an empty head quickly. Their rows are drawn from a pool of random ones. position(t) is a token's
  // text position.
  template <class Position>
  void fill_pooled(int row, int head, int tokens, const Position& position) {
    const std::vector<float>& pool = row_pool();
    const auto rows = static_cast<std::uint32_t>(pool.size() / widest_row);
    const int slot = slots_[row], size = options_.page_size;
    const int pages = (tokens + size - 1) / size;
    length_[slot * options_.kv_heads + head] = tokens;
    PageEntry* entries = &table_[(slot * options_.kv_heads + head) * std::int64_t{options_.max_pages}];
    for (int p = 0; p < pages; ++p) {
      entries[p].frame = free_.back();
      entries[p].tokens = static_cast<std::uint16_t>(std::min(size, tokens - p * size));
      free_.pop_back();
    }
#pragma omp parallel for schedule(static)
    for (int p = 0; p < pages; ++p)
      for (int i = 0; i < entries[p].tokens; ++i) {
        const std::uint32_t t = static_cast<std::uint32_t>(p * size + i + 7919 * (row * options_.kv_heads + head));
        const float* k = &pool[std::size_t{(t * 2654435761u >> 8) % rows} * widest_row];
        const float* v = &pool[std::size_t{(t * 2246822519u >> 8) % rows} * widest_row];
        ops::write_token(aligned_ + std::int64_t{entries[p].frame} * granule_bytes, layouts_[0], i, k, v,
                         position(p * size + i));
      }
  }
  void fill_pooled(int row, int head, int tokens) {
    fill_pooled(row, head, tokens, [](int t) { return t; });
  }

  PagedKv view() {
    PagedKv kv;
    kv.base = aligned_;
    kv.layouts = layouts_.data();
    kv.table = View<const PageEntry, 3>::dense(table_.data(), {options_.rows, options_.kv_heads, options_.max_pages});
    kv.length = View<const std::int32_t, 2>::dense(length_.data(), {options_.rows, options_.kv_heads});
    if (layouts_.size() > 1)
      kv.lower_pages = View<const std::int32_t, 2>::dense(lower_pages_.data(), {options_.rows, options_.kv_heads});
    kv.slots = slots_.data();
    kv.rows = options_.rows;
    kv.kv_heads = options_.kv_heads;
    kv.head_dim = options_.head_dim;
    kv.page_size = options_.page_size;
    kv.rope = options_.rope;
    kv.rope_table = {inv_freq_.data(), options_.head_dim, 1.f};
    return kv;
  }

  // Converts the sides of a bf16 cache that have no codes to f16.
  void to_half() {
    PageLayout& l = layouts_[0];
    const PagedKv kv = view();
    for (int r = 0; r < kv.rows; ++r)
      for (int h = 0; h < kv.kv_heads; ++h)
        for (int t = 0; t < kv.tokens(r, h); ++t)
          for (const bool key : {true, false}) {
            if (ops::side_of(l, key).bits) continue;
            std::byte* at = aligned_ + entry(r, h, t / l.page_size).frame * granule_bytes +
                            ops::row_offset(l, key, t % l.page_size);
            for (int d = 0; d < l.head_dim; ++d, at += 2) {
              bf16 x;
              std::memcpy(&x, at, 2);
              const std::uint16_t y = float_to_half(static_cast<float>(x));
              std::memcpy(at, &y, 2);
            }
          }
    l.dtype = DType::f16;
  }

  // Replaces one number of a stored token, and zeroes the token's state.
  void set(int row, int head, int token, KvSide side, int element, float x) {
    change(row, head, token, [&](auto& k, auto& v) { (side == KvSide::key ? k : v)[element] = x; });
  }
  // Stores what `edit` makes of a token's key and value, and zeroes the token's state.
  template <class Edit>
  void change(int row, int head, int token, const Edit& edit) {
    const PageEntry& e = entry(row, head, token / options_.page_size);
    const PageLayout& l = layouts_[e.codec];
    std::byte* frame = aligned_ + std::int64_t{e.frame} * granule_bytes;
    const int offset = token % options_.page_size;
    std::vector<float> k(options_.head_dim), v(options_.head_dim);
    ops::read_row(frame, l, KvSide::key, offset, k.data());
    ops::read_row(frame, l, KvSide::value, offset, v.data());
    edit(k, v);
    std::int32_t position;
    std::memcpy(&position, frame + l.positions + offset * sizeof(position), sizeof(position));
    ops::write_token(frame, l, offset, k.data(), v.data(), position);
  }

  // Takes a page away from the device.
  void unmap(int row, int head, int page) { entry(row, head, page).frame = null_frame; }
  PageEntry& entry(int row, int head, int page) {
    return table_[(slots_[row] * options_.kv_heads + head) * options_.max_pages + page];
  }

  // Moves the next page of a head, a full one, into another codec (a second layout of this cache), from its first page
  // on. It needs a frame more than the pages take.
  void re_encode(int row, int head, CodecSpec codec) {
    const PageLayout l =
        ops::make_layout(options_.dtype, codec, options_.page_size, options_.head_dim, options_.state_columns);
    if (layouts_.size() < 2) layouts_.push_back(l);
    if (l.bytes > layouts_[0].bytes) throw Error(Errc::internal, "got a larger codec, wanted one that fits the frames");
    PageEntry& e = entry(row, head, lower_pages_[slots_[row] * options_.kv_heads + head]++);
    const std::int32_t frame = free_.back();
    free_.pop_back();
    ops::copy_page(aligned_ + std::int64_t{e.frame} * granule_bytes, layouts_[e.codec],
                   aligned_ + std::int64_t{frame} * granule_bytes, layouts_[1]);
    free_.insert(free_.begin(), e.frame);
    e.frame = frame;
    e.codec = 1;
  }

  // True if nothing was written between or behind the frames.
  bool guards_intact() const { return guards_intact(aligned_); }
  // The same of a copy of the frames, from kv.base on.
  bool guards_intact(const std::byte* base) const {
    const std::int64_t frames = (static_cast<std::int64_t>(arena_.size()) - granule_bytes) / frame_step_;
    for (std::int64_t f = 0; f < frames; ++f)
      for (std::int64_t i = layouts_[0].bytes; i < frame_step_; ++i)
        if (base[f * frame_step_ + i] != guard) return false;
    return true;
  }

  const PagedOptions& options() const { return options_; }
  const std::vector<std::byte>& arena() const { return arena_; }
  std::size_t arena_bytes() const {
    return arena_.size() - static_cast<std::size_t>(aligned_ - arena_.data());
  }  // from kv.base on

 private:
  PagedOptions options_;
  std::vector<PageLayout> layouts_;
  std::vector<std::byte> arena_;
  std::byte* aligned_ = nullptr;
  std::int64_t frame_step_ = 0;
  std::vector<std::int32_t> free_, length_, lower_pages_, slots_;
  std::vector<PageEntry> table_;
  std::vector<float> inv_freq_;
};

// The n-th of a fixed sequence of caches. They differ in head size, group, page size, storage and length, and some
// heads are empty. Text positions have gaps and, if `shuffled`, may be out of order.
struct RandomCache {
  std::mt19937 rng;
  int group;
  PagedFixture cache;

  explicit RandomCache(unsigned n, bool shuffled = true) : rng(n), group(pick({1, 3, 4, 7})), cache(random_options(n)) {
    for (int r = 0; r < cache.options().rows; ++r)
      for (int h = 0; h < cache.options().kv_heads; ++h) {
        std::vector<int> position(rng() % 5 ? rng() % (cache.options().page_size * cache.options().max_pages) : 0);
        for (std::size_t t = 0; t < position.size(); ++t) position[t] = static_cast<int>(3 * t + rng() % 3);
        if (shuffled && rng() % 2) std::shuffle(position.begin(), position.end(), rng);
        for (const int p : position)
          cache.append(r, h, normal(cache.options().head_dim), normal(cache.options().head_dim), p);
      }
  }
  int rows() const { return cache.options().rows; }
  int kv_heads() const { return cache.options().kv_heads; }
  int heads() const { return kv_heads() * group; }
  int room() const { return cache.options().page_size * cache.options().max_pages + 3; }
  std::vector<float> normal(std::int64_t count) {
    std::normal_distribution<float> distribution;
    std::vector<float> x(static_cast<std::size_t>(count));
    for (float& y : x) y = distribution(rng);
    return x;
  }
  int pick(const std::vector<int>& of) { return of[rng() % of.size()]; }

 private:
  PagedOptions random_options(unsigned n) {
    PagedOptions o;
    o.rows = pick({1, 2, 3});
    o.kv_heads = pick({1, 2, 3});
    o.head_dim = pick({8, 16, 64, 80, 128});
    o.page_size = pick({1, 4, 8, 16});
    o.max_pages = 1 + 90 / o.page_size;
    o.dtype = n % 3 == 0 ? DType::f32 : DType::bf16;
    if (n % 3 == 2) o.codec = fitting(codecs_with_codes[n / 3 % std::size(codecs_with_codes)], o.head_dim);
    o.state_columns = 2;
    o.rope = n % 4 == 3 ? RopeRegime::cache_relative : RopeRegime::original;
    return o;
  }
};

// Tables of sequences without pages, for ops that read none. tokens: [row, kv_head].
class LengthsOnly {
 public:
  LengthsOnly(int rows, int kv_heads, int page_size, std::vector<std::int32_t> tokens);
  LengthsOnly(const LengthsOnly&) = delete;
  PagedKv view() const;
  static constexpr std::size_t bytes() { return granule_bytes; }  // from kv.base on

 private:
  std::vector<std::int32_t> length_, slots_;
  std::vector<PageEntry> table_;
  std::vector<std::byte> frame_ = std::vector<std::byte>(granule_bytes);
  PageLayout layout_;
  int rows_, kv_heads_, page_size_;
};

// Heap memory. Scratch is poisoned, state is zeroed.
class HeapWorkspace final : public Workspace {
 public:
  void* scratch(const char* tag, std::size_t bytes) override {
    return take(std::string("scratch ") + tag, bytes, 0xCD);
  }
  void* state(const char* tag, std::size_t bytes_per_slot, int slots) override {
    return take(std::string("state ") + tag, bytes_per_slot * static_cast<std::size_t>(slots), 0);
  }
  const void* constant(const char* tag, const void* from, std::size_t bytes) override {
    return std::memcpy(take(std::string("constant ") + tag, bytes, 0), from, bytes);
  }

 private:
  void* take(const std::string& key, std::size_t bytes, int fill) {
    auto& block = blocks_[key];
    block.assign(bytes + 64, std::byte(fill));
    const auto address = reinterpret_cast<std::uintptr_t>(block.data());
    return block.data() + (64 - address % 64) % 64;
  }
  std::map<std::string, std::vector<std::byte>> blocks_;
};

// A dense float tensor. Poison on both sides and inside shows stray writes and unwritten entries.
template <int Rank>
class Guarded {
 public:
  static constexpr float poison = -12345.678f;

  explicit Guarded(std::array<std::int64_t, Rank> extent) {
    std::size_t n = 1;
    for (const auto e : extent) n *= static_cast<std::size_t>(e);
    data_.assign(n + 2 * margin, poison);
    view_ = View<float, Rank>::dense(data_.data() + margin, extent);
  }
  View<float, Rank> view() const { return view_; }
  template <class... I>
  float& operator()(I... i) const {
    return view_(i...);
  }
  static std::vector<float> copy(View<const float, Rank> dense) {
    std::size_t n = 1;
    for (const auto e : dense.extent) n *= static_cast<std::size_t>(e);
    return {dense.data, dense.data + n};
  }
  std::vector<float> values() const { return {data_.begin() + margin, data_.end() - margin}; }
  bool margins_intact() const {
    for (std::size_t i = 0; i < margin; ++i)
      if (data_[i] != poison || data_[data_.size() - 1 - i] != poison) return false;
    return true;
  }

 private:
  static constexpr std::size_t margin = 64;
  std::vector<float> data_;
  View<float, Rank> view_;
};

// A list of pages or tokens for each head. The room behind every count holds no entry.
struct ListMemory {
  std::vector<std::int32_t> index, count;

  // Poisoned lists: extent = [row, kv_head, room].
  IndexList empty(std::array<std::int64_t, 3> extent) {
    index.assign(static_cast<std::size_t>(extent[0] * extent[1] * extent[2]), -7);
    count.assign(static_cast<std::size_t>(extent[0] * extent[1]), -7);
    return {View<std::int32_t, 3>::dense(index.data(), extent),
            View<std::int32_t, 2>::dense(count.data(), {extent[0], extent[1]})};
  }

  // Lists those of each head's first entries(row, head) entries for which keep() is true.
  template <class Entries, class Keep>
  IndexList choose(const PagedOptions& o, int room, Entries entries, Keep keep) {
    const auto heads = static_cast<std::size_t>(o.rows) * static_cast<std::size_t>(o.kv_heads);
    index.assign(heads * static_cast<std::size_t>(room), -7);
    count.assign(heads, 0);
    const IndexList list{View<std::int32_t, 3>::dense(index.data(), {o.rows, o.kv_heads, room}),
                         View<std::int32_t, 2>::dense(count.data(), {o.rows, o.kv_heads})};
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h)
        for (int i = 0; i < entries(r, h); ++i)
          if (keep()) list.index(r, h, list.count(r, h)++) = i;
    return list;
  }
  IndexList choose_pages(PagedFixture& cache, const PagedOptions& o, auto keep) {
    const PagedKv kv = cache.view();
    return choose(
        o, o.max_pages, [&](int r, int h) { return kv.pages(r, h); }, keep);
  }
  // Lists each token with the probability `share`.
  IndexList choose_tokens(PagedFixture& cache, const PagedOptions& o, int room, double share, std::mt19937& rng) {
    const PagedKv kv = cache.view();
    std::uniform_real_distribution<double> draw;
    return choose(
        o, std::max(1, room), [&](int r, int h) { return kv.tokens(r, h); }, [&] { return draw(rng) < share; });
  }
};

// Largest absolute differences between a fast op and its reference that read the same stored bytes, for values and
// queries of about unit size. Storage is decoded exactly, so only the order of f32 additions differs.
struct Tolerance {
  // Largest difference, relative to values above 1; infinities must be equal.
  static double worst(const std::vector<float>& a, const std::vector<float>& b) {
    double worst = a.size() == b.size() ? 0 : 1e30;
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
      if (!(a[i] == b[i]))
        worst = std::max(worst, std::isfinite(a[i] - b[i])
                                    ? std::abs(double{a[i]} - b[i]) / std::max(1.0, std::abs(double{b[i]}))
                                    : 1e30);
    return worst;
  }
  double output = 2e-5, score = 5e-5, probability = 2e-5, lse = 2e-5;
  // Of products with rows. A GPU takes a vector for bf16 rows as a sum of two bf16 terms, which leaves up to 2^-18 of
  // each element. Over 256 products of numbers near 1 that is a deviation of 3.5e-5. Some 10^5 numbers stay within six.
  double rows(const PagedKv& kv, Stream s) const {
    return s.device() == Device::cuda && kv.layouts[0].dtype == DType::bf16 ? 2.1e-4 : score;
  }
};

}  // namespace kvlab::cases
