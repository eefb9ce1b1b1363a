// Attention of decode steps.
#include "ops/attend/attend.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <kvlab/ops.hpp>

#include <array>
#include <limits>
#include <tuple>

#include "base/device_op.hpp"
#include "base/half.hpp"
#include "cases/attend_scene.hpp"
#include "cases/case.hpp"
#include "cases/quick.hpp"
#include "cases/relative_error.hpp"
#include "ops/attend/late_mass.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

// A GPU multiplies matrices of bf16: the norm of the difference is within two roundings of the reference's.
constexpr double cuda_output = 6e-3;

void compare_values(Place& place, Check& check, const std::string& what, const std::vector<float>& got,
                    const std::vector<float>& wanted, double on_cpu) {
  if (place.stream().device() == Device::cpu)
    check.equal(what, got, wanted, on_cpu);
  else
    check.within(what, relative(got, wanted), cuda_output);
}

// Compares with and without mass. It repeats each call, because a call finds scratch as the one before left it.
void compare(Place& place, Check& check, const AttendShape& shape, unsigned seed, int repeats) {
  const bool cuda = place.stream().device() == Device::cuda;
  AttendScene scene(shape, seed);
  const AttendOutputs wanted = scene.reference();
  if (shape.half) scene.cache.to_half();
  ops::AttendArgs a = scene.put(place);
  const auto arena = View<const std::byte, 1>::dense(a.kv.base, {static_cast<std::int64_t>(scene.cache.arena_bytes())});
  const std::vector<std::byte> before = place.get(arena);
  for (const bool with_mass : {false, true}) {
    const auto scope = check.in(with_mass ? "with mass" : "without mass");
    a.out = place.unwritten(wanted.out.view().extent);
    a.lse = place.unwritten(wanted.lse.view().extent);
    a.mass = with_mass ? place.unwritten(wanted.mass.view().extent) : View<float, 3>{};
    if (cuda && shape.options.dtype == DType::bf16)
      a.rounded = place.put(std::vector<std::uint16_t>(wanted.out.values().size(), 0xffff));
    ops::attend(a, scene.workspace, place.stream());
    const std::vector<float> out = place.get(a.out), lse = place.get(a.lse);
    compare_values(place, check, "out", out, wanted.out.values(), Tolerance{}.output);
    // A GPU rounds turned keys once more than the reference does. Where their scale stays 1, four standard deviations
    // of such a logit's error are 4 * 2 (of queries) * 2^-8 / sqrt(3) / 1.44.
    const bool turned = shape.options.rope == RopeRegime::cache_relative;
    check.equal("lse", lse, wanted.lse.values(),
                !cuda                     ? Tolerance{}.lse
                : shape.most_distance > 0 ? 1.25e-2
                : turned                  ? 8e-3
                                          : 2e-3);
    if (with_mass)
      compare_values(place, check, "mass", place.get(a.mass), wanted.mass.values(), Tolerance{}.probability);
    if (a.rounded) {
      std::vector<std::uint16_t> rounded;
      for (const float x : out) rounded.push_back(shape.half ? float_to_half(x) : bf16(x).bits);
      const auto got = View<const std::uint16_t, 1>::dense(static_cast<const std::uint16_t*>(a.rounded),
                                                           {static_cast<std::int64_t>(rounded.size())});
      check.that("the rounded output is the output, rounded", place.get(got) == rounded);
    }
    for (int i = 0; i < repeats; ++i) {
      ops::attend(a, scene.workspace, place.stream());
      check.that("the next call gives the same bits", place.get(a.out) == out && place.get(a.lse) == lse);
    }
  }
  check.that("the cache is as it was", place.get(arena) == before);
}

std::string name_of(const AttendShape& s) {
  const PagedOptions& o = s.options;
  const std::string type = s.half ? "f16" : name_of(o.dtype);
  std::string n = format_of(o.codec.k, type);
  if (o.codec.k != o.codec.v) n += fmt::format(" and {}", format_of(o.codec.v, type));
  n += fmt::format(", {} x {}/{} heads of {}, page {}", o.rows, o.kv_heads * s.group, o.kv_heads, o.head_dim,
                   o.page_size);
  n += fmt::format(", lengths {}", fmt::join(s.lengths, " "));
  if (s.listed) n += ", pages listed";
  if (s.tokens >= 0) n += fmt::format(", {} of the tokens listed", s.tokens);
  if (s.window) n += fmt::format(", window {}", s.window);
  for (const PromptMask& m : s.masks) n += fmt::format(", mask {} + {}", m.sinks, m.window);
  if (o.rope == RopeRegime::cache_relative) n += ", turned";
  if (s.most_distance) n += fmt::format(", at most {} away", s.most_distance);
  if (s.attention_scale != 1) n += fmt::format(" and scaled by {}", s.attention_scale);
  if (!s.ordered) n += ", out of order";
  if (s.growing) n += ", growing values";
  if (s.lower) n += fmt::format(", first pages of {} and {}", format_of(s.lower->k, type), format_of(s.lower->v, type));
  return n;
}

// Every call makes another case's content.
void add(std::vector<Case>& v, const AttendShape& s, int repeats = 1) {
  const auto seed = static_cast<unsigned>(v.size() + 1);
  Case c = checked("attend", name_of(s), [=](Place& place, Check& check) { compare(place, check, s, seed, repeats); });
  c.cpu = !s.half;
  v.push_back(std::move(c));
}

const CodecSpec plain, codes{{8}, {8}}, keys{{8}, {0}}, values{{0}, {8}};

AttendShape shape_of(int rows, int kv_heads, int dim, int page, DType dtype, CodecSpec codec, int group) {
  AttendShape s;
  s.options.rows = rows, s.options.kv_heads = kv_heads, s.options.head_dim = dim, s.options.page_size = page;
  s.options.dtype = dtype, s.options.codec = codec;
  s.group = group;
  return s;
}
AttendShape bf16_shape(int rows, int kv_heads, int dim, int page, int group) {
  return shape_of(rows, kv_heads, dim, page, DType::bf16, {}, group);
}
// Every third one turns keys on reading.
RopeRegime regime(unsigned n) { return n % 3 == 0 ? RopeRegime::cache_relative : RopeRegime::original; }

// Ragged caches of every storage. quick() takes every seventh shape.
void add_storages(std::vector<Case>& v) {
  const CodecSpec codecs[] = {plain, plain, codes, keys};
  unsigned n = 0;
  for (const int dim : {16, 32, 64, 80, 128})
    for (const int page : {4, 8, 16, 32})
      for (const int storage : {0, 1, 2, 3}) {
        if (++n % 7 && quick()) continue;
        AttendShape s =
            shape_of(1 + static_cast<int>(n % 5), 1 + static_cast<int>(n % 4), dim, page,
                     storage == 0 ? DType::f32 : DType::bf16, codecs[storage], std::array{1, 3, 4, 7}[n % 4]);
        s.options.max_pages = 100;
        s.options.rope = regime(n);
        s.lengths = {37, 0, 1, 300, page, 5 * page + 1};
        s.listed = n % 2;
        s.window = n % 5 ? 0 : 20;
        add(v, s);
      }
  for (const DType dtype : {DType::f32, DType::bf16})  // masks of prompts go to the general kernel
    for (const int dim : {16, 64}) {
      AttendShape masked = shape_of(2, 3, dim, 16, dtype, {}, 3);
      masked.lengths = {90, 300, 37, 301, 1, 64};
      masked.masks = {{5, 20}, {0, 0}, {0, 1}};
      masked.window = dim == 16 ? 0 : 250;
      add(v, masked);
    }
  AttendShape mixed = bf16_shape(1, 2, 64, 16, 3);
  mixed.lengths = {333, 100};
  mixed.lower = CodecSpec{{8}, {8}};
  add(v, mixed);
}

// Every head size, page size and group that a GPU's pipelined kernel takes.
void add_pipelined(std::vector<Case>& v) {
  unsigned n = 0;
  for (const int dim : {64, 96, 128, 256})
    for (const int page : {8, 16, 32, 64})
      for (const int group : {1, 4, 7, 16})
        for (const int list : {0, 1, 2}) {
          if (++n % 17 && quick()) continue;
          AttendShape s = bf16_shape(3, 2, dim, page, group);
          s.lengths = {700, 1, 17, 0, 333, 64};
          s.listed = list == 1;
          s.window = list == 2 ? 50 : 0;
          add(v, s);
        }
}

// Keys that are turned by their ranks on reading.
void add_turned(std::vector<Case>& v) {
  for (const int dim : {64, 128, 256})
    for (const int page : {8, 16, 64})
      for (const int group : {3, 16}) {
        if (quick() && (page == 64) != (group == 16)) continue;
        AttendShape s = bf16_shape(2, 2, dim, page, group);
        s.options.rope = RopeRegime::cache_relative;
        s.lengths = {390, 1, 0, 145};
        add(v, s);
        s.ordered = false;
        add(v, s);
        s.listed = true;
        s.attention_scale = 0.75f;
        add(v, s);
      }
}

struct Kind {
  CodecSpec codec;
  DType dtype;
  int dim, page, group;
};

// Keys of tokens that lie far away are turned on.
void add_clamped(std::vector<Case>& v) {
  for (const Kind& k : {Kind{plain, DType::bf16, 64, 16, 3},
                        {plain, DType::bf16, 128, 32, 4},
                        {plain, DType::bf16, 128, 8, 16},
                        {plain, DType::bf16, 256, 64, 1},
                        {plain, DType::bf16, 96, 16, 2},
                        {plain, DType::f32, 16, 5, 3},
                        {codes, DType::bf16, 128, 16, 4},
                        {keys, DType::bf16, 64, 16, 3}})
    for (const int most : {1, 60, 1000}) {
      if (quick() && most == 1000 && k.dim != 64) continue;
      AttendShape s = shape_of(2, 2, k.dim, k.page, k.dtype, k.codec, k.group);
      s.most_distance = most;
      s.lengths = {390, 1, 0, 145};
      s.attention_scale = 0.75f;  // cached keys carry it
      add(v, s);
      s.ordered = false, s.listed = true;
      add(v, s);
      s.listed = false, s.tokens = 0.6, s.window = 100;
      add(v, s);
    }
  AttendShape mixed = bf16_shape(1, 2, 64, 16, 3);
  mixed.lengths = {333, 100};
  mixed.most_distance = 40;
  mixed.lower = CodecSpec{{8}, {8}};
  add(v, mixed);
}

void add_half(std::vector<Case>& v) {
  for (const int dim : {64, 96, 128, 256, 80}) {  // the kernel for caches of any kind takes 80
    AttendShape s = bf16_shape(3, 2, dim, 16, dim == 128 ? 11 : 3);
    s.half = true;
    s.lengths = {390, 1, 17, 0, 145, 64};
    add(v, s);
    s.listed = true;
    add(v, s);
    s.listed = false, s.window = 50;
    add(v, s);
    if (dim % 64) continue;
    s.window = 0, s.options.rope = RopeRegime::cache_relative;
    add(v, s);
  }
}

// How blocks of a GPU share pairs of row and KV head.
void add_shares(std::vector<Case>& v) {
  AttendShape s = bf16_shape(1, 2, 128, 16, 4);
  s.lengths = {9500, 9473};  // one sequence for all multiprocessors
  add(v, s);
  s.options.rows = 300, s.options.kv_heads = 4;  // many for one
  s.lengths = {5, 40, 16, 0, 33, 1, 48};
  add(v, s);

  // The last block to finish merges. Which one that is must not change a bit.
  const int spans = quick() ? 16 : 132;                                         // at least one per multiprocessor
  for (const auto& [units, pairs] : {std::pair{165, 3}, {170, 1}, {420, 7}}) {  // units of a span
    if (quick() && pairs != 3) continue;
    const int tokens = units * 16 * spans / pairs;
    AttendShape bits = bf16_shape(1, pairs, 64, 16, 1);
    for (int i = 0; i < pairs; ++i) bits.lengths.push_back(tokens * (pairs + 1 + 2 * i) / (2 * pairs) - i);
    add(v, bits, 3);
  }

  // Pairs of about equal length take whole blocks. The last blocks may have few units or none.
  for (const auto& lengths : {std::vector{2000, 2000}, {1601, 1590, 1570}, {270, 290}, {1, 2}}) {
    AttendShape same = bf16_shape(3, 2, 128, 16, 4);
    same.lengths = lengths;
    add(v, same, 3);
  }
  for (const auto& lengths : {std::vector{40, 1}, {17, 0}, {0, 100}, {33, 48}}) {  // too few for all multiprocessors
    AttendShape few = bf16_shape(1, 2, 64, 16, 2);
    few.lengths = lengths;
    add(v, few);
  }
}

// Caches of any kind, whose work a GPU cuts into several parts.
void add_parts(std::vector<Case>& v) {
  for (const Kind& k : {Kind{codes, DType::bf16, 128, 16, 4},
                        {values, DType::bf16, 72, 5, 3},
                        {plain, DType::f32, 256, 7, 1},
                        {codes, DType::bf16, 64, 16, 11},
                        {plain, DType::bf16, 96, 16, 2},
                        {values, DType::f32, 8, 4, 8}})
    for (const RopeRegime rope : {RopeRegime::original, RopeRegime::cache_relative}) {
      AttendShape s = shape_of(3, 2, k.dim, k.page, k.dtype, k.codec, k.group);
      s.options.rope = rope;
      if (rope == RopeRegime::cache_relative) s.attention_scale = 0.75f;
      s.lengths = {900, 1, 257, 0, 512, 33};
      add(v, s);
      s.ordered = false;
      add(v, s);
      s.listed = true;
      add(v, s);
      s.window = 300;
      add(v, s);
    }
}

// Lists of tokens. quick() takes every seventh shape.
void add_tokens(std::vector<Case>& v) {
  const CodecSpec codecs[] = {plain, plain, codes, keys, values};
  unsigned n = 0;
  for (const int page : {5, 16})
    for (const int group : {1, 2, 5, 8, 16})
      for (const int storage : {0, 1, 2, 3, 4})
        for (const double share : {0.03, 0.6, 1.0}) {
          if (++n % 7 && quick()) continue;
          AttendShape s = shape_of(2, 3, std::array{64, 80, 16}[n % 3], page, storage == 0 ? DType::f32 : DType::bf16,
                                   codecs[storage], group);
          s.options.rope = regime(n);
          s.lengths = {37, 0, 1, 700, page, 5 * page + 1};
          s.tokens = share;
          s.window = n % 4 ? 0 : 40;
          add(v, s);
        }
  for (const Kind& k : {Kind{plain, DType::bf16, 128, 16, 4},
                        {plain, DType::bf16, 64, 16, 16},
                        {plain, DType::bf16, 256, 5, 1},
                        {plain, DType::bf16, 128, 7, 11},
                        {plain, DType::bf16, 64, 5, 3},
                        {codes, DType::bf16, 128, 16, 8},
                        {codes, DType::bf16, 96, 5, 2},
                        {values, DType::bf16, 72, 5, 3},
                        {keys, DType::bf16, 64, 16, 11},
                        {plain, DType::f32, 256, 5, 1}})
    for (const RopeRegime rope : {RopeRegime::original, RopeRegime::cache_relative})
      for (const double share : {1.0, 0.4, 0.02, 0.0, 0.6}) {
        if (++n % 7 && quick()) continue;
        AttendShape s = shape_of(3, 2, k.dim, k.page, k.dtype, k.codec, k.group);
        s.options.rope = rope;
        s.lengths = {900, 1, 257, 0, 512, 33};
        s.tokens = share;
        s.ordered = share != 0.4;
        s.window = share == 0.6 ? 300 : 0;
        add(v, s);
        if (share != 0.6 || k.dtype != DType::bf16 || k.codec.k.bits || k.codec.v.bits) continue;
        s.half = true;
        add(v, s);
      }
  // Some units for every warp of a GPU.
  for (const int dim : {64, 128}) {
    AttendShape many = bf16_shape(2, 4, dim, 16, dim == 64 ? 3 : 11);
    const int tokens = (quick() ? 16 : 132) * 200;
    many.lengths = {tokens, tokens / 3, tokens - 7};
    many.tokens = 0.6;
    add(v, many, 2);
  }
}

// Codes of every format on either side, whole caches and lists.
void add_codes(std::vector<Case>& v) {
  constexpr int groups[] = {4, 1, 8, 3, 7};
  unsigned n = 0;
  for (const CodecSpec& codec : codecs_with_codes)
    for (const int dim : {64, 80, 128})
      for (const int page : {8, 16, 32}) {
        if (++n % 4 && quick()) continue;
        AttendShape s = shape_of(3, 2, dim, page, n % 5 ? DType::bf16 : DType::f32, codec, groups[n % 5]);
        s.half = n % 5 > 2 && (codec.k.bits == 0 || codec.v.bits == 0);
        s.options.rope = regime(n);
        s.lengths = {700, 1, 2 * page + 5, 0, 37, page};
        add(v, s);
        s.listed = true;
        s.window = n % 3 == 1 ? 40 : 0;
        add(v, s);
        s.listed = false;
        s.tokens = n % 3 ? 0.6 : 1;
        s.ordered = n % 5 < 3;
        add(v, s);
      }
  // A GPU cuts these into parts.
  for (const CodecSpec& codec : codecs_with_codes)
    for (const int group : {4, 5}) {
      AttendShape s = shape_of(1, 2, 128, 16, DType::bf16, codec, group);
      s.options.rope = regime(++n);
      s.lengths = {1100, 513};
      add(v, s);
    }
  // The scales of values grow while a warp adds them.
  for (const CodecSpec& codec : {CodecSpec{{8}, {8}}, CodecSpec{{4}, {4}}, CodecSpec{fp8, fp8}}) {
    AttendShape s = shape_of(40, 8, 128, 16, DType::bf16, codec, 4);
    s.lengths = {300};
    s.growing = true;
    add(v, s);
  }
}

// Caches of two codecs.
void add_two_codecs(std::vector<Case>& v) {
  constexpr auto integer = CodeKind::integer;
  const CodecSpec kivi4{{4, integer, CodeAxis::channel, 32}, {4, integer, CodeAxis::token, 32}};
  const CodecSpec kivi2{{2, integer, CodeAxis::channel, 32}, {2, integer, CodeAxis::token, 32}};
  const CodecSpec groups4{{4, integer, CodeAxis::channel, 8}, {4, integer, CodeAxis::token, 16}};
  const CodecSpec groups8{{8, integer, CodeAxis::token, 8}, {8, integer, CodeAxis::channel, 4}};
  unsigned n = 0;
  for (const auto& [first, second] : {std::pair{CodecSpec{{8}, {4}}, CodecSpec{{4}, {2}}},
                                      {CodecSpec{}, CodecSpec{{4}, {4}}},
                                      {CodecSpec{{8}, {8}}, CodecSpec{fp8, fp8}},
                                      {CodecSpec{{}, {8}}, CodecSpec{{2}, {4}}},
                                      {CodecSpec{}, kivi4},
                                      {CodecSpec{}, kivi2},
                                      {CodecSpec{}, groups4},
                                      {CodecSpec{}, groups8}})
    for (const int dim : {64, 128})
      for (const int page : {8, 16, 32}) {
        AttendShape s = shape_of(3, 2, dim, page, DType::bf16, first, n % 2 ? 4 : 3);
        s.lower = second;
        s.lengths = {700, 1, 2 * page + 5, 0, 37, 4 * page};
        s.window = n % 4 == 3 ? 40 : 0;
        s.options.rope = n % 7 == 6 ? RopeRegime::cache_relative : RopeRegime::original;
        add(v, s);
        if (++n % 6 == 0) s.listed = true, add(v, s);
        if (n % 6 == 3) s.tokens = 150, add(v, s);
      }
  // More pairs than a launch takes, and a sequence that blocks share.
  AttendShape many = shape_of(70, 8, 128, 16, DType::bf16, {{8}, {4}}, 4);
  many.lower = CodecSpec{{4}, {2}};
  many.lengths = {90, 64, 300, 17};
  add(v, many);
  AttendShape deep = shape_of(1, 2, 128, 16, DType::bf16, {{8}, {4}}, 4);
  deep.lower = CodecSpec{{4}, {2}};
  deep.lengths = {5000, 3001};
  add(v, deep);
  // Groups of other kernels. The last one does not fit one launch.
  for (const auto& [group, page] : {std::pair{3, 32}, {6, 16}, {8, 16}}) {
    AttendShape other = shape_of(2, 2, 128, page, DType::bf16, {{8}, {8}}, group);
    other.lower = CodecSpec{{4}, {4}};
    other.lengths = {700, 65, 300};
    add(v, other);
    other.options.codec = CodecSpec{{8}, {4}}, other.lower = CodecSpec{{4}, {2}};
    add(v, other);
  }
  for (const CodecSpec& codec : {kivi4, kivi2}) {
    many.options.codec = deep.options.codec = {};
    many.lower = deep.lower = codec;
    many.growing = deep.growing = codec.k.bits == 2;
    add(v, many), add(v, deep);
  }
}

// Sums of mass in a column of token state, after two calls.
void check_sums(Place& place, Check& check, const AttendShape& shape, GroupRule rule, unsigned seed) {
  AttendScene scene(shape, seed);
  const PagedOptions& o = shape.options;
  const AttendOutputs wanted = scene.reference();
  std::vector<float> sums(static_cast<std::size_t>(std::int64_t{o.rows} * o.kv_heads * scene.room), 0.f);
  const auto sum_of = View<float, 3>::dense(sums.data(), {o.rows, o.kv_heads, scene.room});
  // Of a query head's mass on a token, or of its softmax over the head's tokens.
  const auto weight = [&](int r, int head, int t, int tokens) {
    const auto mass = [&](int i) { return wanted.mass.view()(r, head, i); };
    if (rule != GroupRule::softmax_mean) return mass(t);
    double total = 0;
    for (int i = 0; i < tokens; ++i) total += std::exp(double{mass(i)} - mass(t));
    return static_cast<float>(1 / total);
  };
  for (int r = 0; r < o.rows; ++r)
    for (int h = 0; h < o.kv_heads; ++h)
      for (int t = 0; t < scene.length(r, h); ++t) {
        float all = 0, most = 0;
        for (int j = 0; j < shape.group; ++j) {
          const float x = weight(r, h * shape.group + j, t, scene.length(r, h));
          all += x, most = std::max(most, x);
        }
        sum_of(r, h, t) = 2 * (rule == GroupRule::max   ? most
                               : rule == GroupRule::sum ? all
                                                        : all / static_cast<float>(shape.group));
      }
  if (shape.half) scene.cache.to_half();
  ops::AttendArgs a = scene.put(place);
  a.out = place.unwritten(wanted.out.view().extent);
  a.mass_into = {1, rule};
  // Rows of mass that lie side by side, and rows at any place, which no load of several scores fits.
  const std::int64_t row = std::int64_t{scene.heads()} * scene.room + (seed % 3 ? 0 : 1);
  a.mass = {place.take<float>(static_cast<std::size_t>(o.rows * row)), wanted.mass.view().extent, {row, scene.room, 1}};
  for (int i = 0; i < 2; ++i) ops::attend(a, scene.workspace, place.stream());
  compare_values(place, check, "out", place.get(a.out), wanted.out.values(), Tolerance{}.output);
  const auto sums_in = [&](int column) {
    const Scores got = place.put(View<float, 3>::dense(std::vector<float>(sums.size()).data(), sum_of.extent));
    ops::read_state({&a.kv, column}, got, place.stream());
    return place.get(got);
  };
  const std::vector<float> at_once = sums_in(1), zeros(sums.size(), 0.f);
  compare_values(place, check, "sums", at_once, sums, Tolerance{}.probability);
  check.that("the other column is 0", sums_in(0) == zeros);
  if (place.stream().device() == Device::cpu) return;
  // The other column gets the same by a later launch, where the op leaves the mass.
  ops::LateMass late;
  late.tokens = static_cast<int>(scene.room);
  late.room = place.take<std::byte>(
      static_cast<std::size_t>(ops::LateMass::bytes(o.rows, scene.heads(), o.kv_heads, late.tokens)));
  a.late = &late, a.mass_into = {0, rule};
  const std::vector<float> out = place.get(a.out);
  for (int i = 0; i < 2; ++i) {
    late.left = false;
    ops::attend(a, scene.workspace, place.stream());
    if (late.left) only_on_cuda<ops::add_late_mass>(std::array{late}, place.stream());
  }
  check.that("the output is the same", place.get(a.out) == out);
  check.that("a later launch adds the same", sums_in(0) == at_once);
  check.that("the first column stays", sums_in(1) == at_once);
  const bool listed = shape.listed || shape.tokens >= 0, shares = o.page_size % 16 == 0 && o.head_dim % 16 == 0;
  check.that("the op leaves mass where its kernel leaves shares",
             late.left == (shares && o.head_dim != 80 && !listed && !shape.lower && rule != GroupRule::softmax_mean));
}

void add_sums(std::vector<Case>& v) {
  const auto shape = [](CodecSpec codec, int dim, int page, int group) {
    AttendShape s = shape_of(3, 2, dim, page, DType::bf16, codec, group);
    s.options.state_columns = 2;
    s.lengths = {700, 1, 2 * page + 5, 0, 37, 4 * page};
    return s;
  };
  std::vector<AttendShape> shapes{shape({}, 128, 16, 4), shape({}, 64, 16, 16),         shape({}, 80, 16, 3),
                                  shape({}, 96, 32, 1),  shape({{8}, {4}}, 128, 32, 8), shape({{8}, {8}}, 64, 8, 2),
                                  shape({}, 64, 16, 6)};
  shapes.push_back(shape({}, 128, 16, 4));
  shapes.back().listed = true, shapes.back().window = 50;
  shapes.push_back(shape({{4}, {4}}, 128, 32, 3));
  shapes.push_back(shape({}, 64, 8, 2));
  shapes.back().listed = true;
  shapes.push_back(shape({}, 64, 64, 1));
  shapes.push_back(shape({{8}, {8}}, 128, 16, 4));
  shapes.back().tokens = 0.4;
  for (const CodecSpec& lower : {CodecSpec{{4}, {2}}, CodecSpec{{4}, {4}}}) {
    shapes.push_back(shape({{8}, {4}}, 128, 16, 4));
    shapes.back().lower = lower;
    shapes.back().window = lower.v.bits == 4 ? 40 : 0;
  }
  shapes.push_back(shape({}, 64, 32, 2));
  shapes.push_back(shape({}, 128, 16, 2));
  // Heads that many blocks share, of which each waits for the last one, and more pairs than a launch takes.
  for (const int group : {4, 1}) {
    shapes.push_back(shape({{8}, {4}}, 128, 16, group));
    shapes.back().options.rows = 1;
    shapes.back().lengths = {5000, 3001};
    if (group > 1) shapes.back().lower = CodecSpec{{4}, {2}};
  }
  shapes.push_back(shape({}, 64, 16, 2));
  shapes.back().options.rows = 130, shapes.back().options.kv_heads = 8;
  shapes.back().lengths = {17, 0, 5, 40};
  using enum GroupRule;
  const GroupRule rules[] = {max,  max,          mean, softmax_mean, sum,  max, max, mean, max, sum,
                             mean, softmax_mean, max,  sum,          mean, max, max, sum,  mean};
  unsigned n = 0;
  for (const AttendShape& s : shapes) {
    const GroupRule rule = rules[n++];
    v.push_back(checked("attend",
                        fmt::format("mass into state by {}, {}",
                                    Choices<GroupRule>::all[static_cast<std::size_t>(rule)].second, name_of(s)),
                        [=](Place& place, Check& check) { check_sums(place, check, s, rule, n); }));
  }
}

// Logits of some heads. Those of the others stay as they are.
void check_logits(Place& place, Check& check, const AttendShape& shape, unsigned seed) {
  constexpr float before = 7777;
  AttendScene scene(shape, seed);
  const PagedOptions& o = shape.options;
  std::mt19937 rng(seed);
  std::vector<std::int32_t> index(static_cast<std::size_t>(o.kv_heads), -1);
  std::vector<std::uint8_t> flags;
  std::int64_t count = 0;
  for (int h = o.kv_heads - 1; h >= 0; --h)
    if (h % 3 != 1) index[static_cast<std::size_t>(h)] = static_cast<std::int32_t>(count++);
  for (int i = 0; i < o.rows * o.kv_heads; ++i) flags.push_back(rng() % 4 > 0);
  // Rows that lie side by side, and rows at any place, which no store of several numbers fits.
  const std::int64_t head = std::int64_t{scene.room} * shape.group, row = count * head + (seed % 3 ? 0 : 1);
  std::vector<float> wanted(static_cast<std::size_t>(o.rows * row), before);
  const auto logits_of = [&](float* data, const std::int32_t* of_heads, View<const std::uint8_t, 2> marks) {
    return HeadLogits{View<float, 4>{data, {o.rows, count, scene.room, shape.group}, {row, head, shape.group, 1}},
                      of_heads, Heads::flagged(marks)};
  };
  const auto marks = View<const std::uint8_t, 2>::dense(flags.data(), {o.rows, o.kv_heads});
  const AttendOutputs outputs = scene.outputs();
  ops::AttendArgs by_reference = scene.inputs();
  by_reference.out = outputs.out.view();
  by_reference.logits = logits_of(wanted.data(), index.data(), marks);
  attend_reference_of_rows(by_reference);
  if (shape.half) scene.cache.to_half();
  ops::AttendArgs a = scene.put(place);
  a.out = place.unwritten(outputs.out.view().extent);
  float* data = place.put(std::vector<float>(wanted.size(), before));
  a.logits = logits_of(data, place.put(index), place.put(marks));
  ops::attend(a, scene.workspace, place.stream());
  compare_values(place, check, "out", place.get(a.out), outputs.out.values(), Tolerance{}.output);
  const auto all = View<float, 1>::dense(data, {static_cast<std::int64_t>(wanted.size())});
  const std::vector<float> got = place.get(all);
  std::vector<float> seen, seen_wanted;
  bool same = true;
  for (std::size_t i = 0; i < got.size(); ++i)
    if (wanted[i] == before || wanted[i] == -std::numeric_limits<float>::infinity())
      same = same && got[i] == wanted[i];
    else
      seen.push_back(got[i]), seen_wanted.push_back(wanted[i]);
  check.that("other logits stay, and those of hidden tokens are -inf", same);
  compare_values(place, check, "logits", seen, seen_wanted, 10 * Tolerance{}.output);
}

void add_logits(std::vector<Case>& v) {
  const auto shape = [](CodecSpec codec, int dim, int page, int group, DType dtype = DType::bf16) {
    AttendShape s = shape_of(3, 2, dim, page, dtype, codec, group);
    s.lengths = {700, 1, 2 * page + 5, 0, 37, 4 * page};
    return s;
  };
  std::vector<AttendShape> shapes{shape({}, 128, 16, 4),
                                  shape({}, 64, 16, 16),
                                  shape({}, 80, 16, 3),
                                  shape({}, 96, 32, 1),
                                  shape({{8}, {4}}, 128, 32, 8),
                                  shape({}, 64, 8, 6),
                                  shape({}, 32, 16, 4, DType::f32),
                                  shape({{8}, {8}}, 64, 8, 2)};
  for (const std::size_t i : {0, 2}) {
    shapes.push_back(shapes[i]);
    shapes.back().window = 50;
  }
  shapes.push_back(shape({{8}, {4}}, 128, 16, 4));
  shapes.back().lower = CodecSpec{{4}, {2}};
  shapes.push_back(shape_of(2, 5, 128, 16, DType::bf16, {}, 4));  // pairs that blocks share
  shapes.back().lengths = {5000, 17, 3001};
  // Logits tell whether all 16 bits of a query count, outputs do not.
  shapes.push_back(shape({{4}, {4}}, 128, 16, 4));
  shapes.push_back(shape({{8}, {8}}, 64, 32, 3));
  shapes.push_back(shape({{4}, {2}}, 128, 32, 1));
  shapes.push_back(shape({{2}, {4}}, 128, 16, 7));
  unsigned n = 0;
  for (const AttendShape& s : shapes) {
    ++n;
    v.push_back(checked("attend", fmt::format("logits of some heads, {}", name_of(s)),
                        [=](Place& place, Check& check) { check_logits(place, check, s, n); }));
  }
}

void check_random_caches(Place& place, Check& check) {
  for (unsigned n = 0; n < 24; ++n) {
    RandomCache r(n);
    const PagedOptions& o = r.cache.options();
    const auto q = r.normal(std::int64_t{o.rows} * r.heads() * o.head_dim);
    Guarded<3> out({o.rows, r.heads(), o.head_dim});
    Guarded<2> lse({o.rows, r.heads()});
    ops::AttendArgs a;
    a.kv = r.cache.view();
    a.queries = View<const float, 3>::dense(q.data(), out.view().extent);
    a.out = out.view();
    a.lse = lse.view();
    ops::attend_reference(a);
    ops::AttendArgs b = a;
    b.kv = place.put(a.kv, r.cache.arena_bytes());
    b.queries = place.put(a.queries);
    b.out = place.unwritten(a.out.extent);
    b.lse = place.unwritten(a.lse.extent);
    HeapWorkspace w;
    ops::attend(b, w, place.stream());
    compare_values(place, check, fmt::format("out of cache {}", n), place.get(b.out), out.values(), Tolerance{}.output);
  }
}

// No shortcut of the softmax may hide a NaN that attention reads.
void check_nan(Place& place, Check& check, const AttendShape& kind, bool with_mass) {
  const int spoilt_head = 1, element = 7, dim = kind.options.head_dim;
  for (const int tokens : {1, 21, 600}) {
    AttendShape s = kind;
    s.lengths = {tokens};
    struct Outcome {
      std::vector<float> out, mass;
    };
    const auto outcome = [&](int spoilt, KvSide side) {  // spoilt: a token; -1 = all, -2 = none
      AttendScene scene(s, 3);
      for (int t = 0; t < tokens; ++t)
        if (spoilt == -1 || spoilt == t)
          scene.cache.set(0, spoilt_head, t, side, element, std::numeric_limits<float>::quiet_NaN());
      ops::AttendArgs a = scene.put(place);
      std::vector<float> out(scene.q.size()), mass(static_cast<std::size_t>(scene.heads() * tokens));
      a.out = place.put(View<float, 3>::dense(out.data(), {1, scene.heads(), dim}));
      if (with_mass) a.mass = place.put(View<float, 3>::dense(mass.data(), {1, scene.heads(), tokens}));
      ops::attend(a, scene.workspace, place.stream());
      return Outcome{place.get(a.out), with_mass ? place.get(a.mass) : mass};
    };
    const Outcome clean = outcome(-2, KvSide::key);
    for (const int spoilt : {0, tokens / 2, tokens - 1, -1})
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        const Outcome got = outcome(spoilt, side);
        bool out = true, mass = true, others = true;
        for (std::size_t i = 0; i < got.out.size(); ++i) {
          const int head = static_cast<int>(i) / dim, d = static_cast<int>(i) % dim;
          const bool reads = head / s.group == spoilt_head && (side == KvSide::key || d == element);
          out = out && std::isnan(got.out[i]) == reads;
          others = others && (reads || got.out[i] == clean.out[i]);
        }
        for (std::size_t i = 0; with_mass && i < got.mass.size(); ++i) {
          const bool reads = static_cast<int>(i) / tokens / s.group == spoilt_head && side == KvSide::key;
          mass = mass && (!reads || tokens > 100 || std::isnan(got.mass[i]));
          others = others && (reads || got.mass[i] == clean.mass[i]);
        }
        const auto scope =
            check.in(fmt::format("{} of token {} of {}", side == KvSide::key ? "key" : "value", spoilt, tokens));
        check.that("NaN is in the outputs that read it, and nowhere else", out);
        check.that("NaN is in the mass that reads it", mass);
        check.that("other outputs have the bits as without NaN", others);
      }
  }
}

void add_nan(std::vector<Case>& v) {
  for (const auto& [dim, page, dtype, mass] : {std::tuple{16, 4, DType::f32, true},
                                               {64, 16, DType::bf16, false},
                                               {128, 16, DType::bf16, true},
                                               {80, 16, DType::bf16, false},
                                               {80, 16, DType::bf16, true}}) {
    const AttendShape s = shape_of(1, 2, dim, page, dtype, {}, 3);
    v.push_back(checked("attend",
                        fmt::format("NaN keys and values, heads of {}, page {}{}", dim, page, mass ? ", mass" : ""),
                        [s, with_mass = mass](Place& place, Check& check) { check_nan(place, check, s, with_mass); }));
  }
}

// Layers of the same content. A run attends to one after the other, as a decode step does.
class StepScene final : public Scene {
 public:
  // late: attention leaves its mass, and nothing adds it.
  StepScene(Place& place, const AttendShape& shape, int copies, bool late)
      : place_(place), scene_(shape, 7), workspace_(ledger_, place.stream()), args_(scene_.put(place)) {
    layers_.push_back(args_.kv.base);
    while (static_cast<int>(layers_.size()) < copies)
      layers_.push_back(place.put(scene_.cache.view().base, scene_.cache.arena_bytes()));
    args_.out = View<float, 3>::dense(place.take<float>(scene_.q.size()), args_.queries.extent);
    if (shape.options.state_columns == 0) return;
    const std::int64_t rows = shape.options.rows, heads = scene_.heads(), room = scene_.room;
    args_.mass =
        View<float, 3>::dense(place.take<float>(static_cast<std::size_t>(rows * heads * room)), {rows, heads, room});
    args_.mass_into = {0, GroupRule::max};
    if (!late) return;
    late_.tokens = static_cast<int>(room);
    late_.room = place.take<std::byte>(
        static_cast<std::size_t>(ops::LateMass::bytes(rows, static_cast<int>(heads), shape.options.kv_heads, room)));
    args_.late = &late_;
  }
  void run(int copy) override {
    args_.kv.base = layers_[static_cast<std::size_t>(copy)];
    ops::attend(args_, workspace_, place_.stream());
    workspace_.reset();
  }
  void check(Check& check) override {
    std::vector<float> wanted(scene_.q.size());
    ops::AttendArgs a = scene_.inputs();
    a.out = View<float, 3>::dense(wanted.data(), a.queries.extent);
    attend_reference_of_rows(a);
    run(0);
    compare_values(place_, check, "out", place_.get(args_.out), wanted, Tolerance{}.output);
  }

 private:
  Place& place_;
  AttendScene scene_;
  Ledger ledger_;
  StoreWorkspace workspace_;
  ops::AttendArgs args_;
  ops::LateMass late_;
  std::vector<std::byte*> layers_;
};

// tokens: of all rows together that a KV head reads.
Case step(const std::string& name, const AttendShape& shape, std::int64_t tokens, bool cuda, bool late = false) {
  Case c{"attend", name};
  c.make = [=](Place& place, int copies) { return std::make_unique<StepScene>(place, shape, copies, late); };
  (cuda ? c.timed_cuda : c.timed_cpu) = true;
  const PagedOptions& o = shape.options;
  const auto side = [&](CodecSide s) { return ops::row_bytes(s, o.dtype, o.head_dim) + (s.bits ? 4 : 0); };
  const auto row = [&](const CodecSpec& codec) { return static_cast<double>(side(codec.k) + side(codec.v)); };
  constexpr double low = 0.5625;  // share of the tokens that AttendScene stores in the second codec
  const double of_token = shape.lower ? low * row(*shape.lower) + (1 - low) * row(o.codec) : row(o.codec);
  c.work.bytes = of_token * static_cast<double>(o.kv_heads * tokens);
  c.work.flops = 4. * o.kv_heads * shape.group * o.head_dim * static_cast<double>(tokens);
  c.copies = cuda ? std::max(4, static_cast<int>(350e6 / c.work.bytes) + 1) : 30;  // a GPU's L2 cache holds 60 MB
  const bool any = o.codec.k.bits && o.rope == RopeRegime::cache_relative;
  if (cuda) c.kernel = any ? "any codec" : "mma, bulk copies";
  return c;
}

// 64 sequences of 1K to 64K, together as many tokens as 8 x 32K.
std::vector<int> ragged_lengths() {
  const auto lengths = [](double power) {
    std::vector<int> n;
    for (int i = 0; i < 64; ++i) n.push_back(static_cast<int>(1024 * std::pow(64., std::pow(i / 63., power))));
    return n;
  };
  const auto sum = [](const std::vector<int>& n) { return std::accumulate(n.begin(), n.end(), std::int64_t{0}); };
  double low = 1, high = 50;
  for (int i = 0; i < 60; ++i) (sum(lengths((low + high) / 2)) > 8 * 32768 ? low : high) = (low + high) / 2;
  std::vector<int> n = lengths(high);
  n[62] += static_cast<int>(8 * 32768 - sum(n));
  return n;
}

// SmolLM2-135M's shape on the CPU, Llama-3.1-8B's on a GPU.
void add_steps(std::vector<Case>& v) {
  for (const auto& [depth, turned] : {std::pair{2048, false}, {8192, false}, {1024, true}}) {
    AttendShape s = bf16_shape(1, 3, 64, 16, 3);
    s.lengths = {depth};
    if (turned) s.options.rope = RopeRegime::cache_relative, s.ordered = false;
    v.push_back(
        step(fmt::format("bf16 9/3 heads of 64, depth {}{}", depth, turned ? ", relative" : ""), s, depth, false));
  }
  for (const CodecSpec& codec : {codes, CodecSpec{{4}, {4}}, CodecSpec{{4}, {2}}, CodecSpec{fp8, fp8}}) {
    AttendShape s = shape_of(1, 3, 64, 16, DType::bf16, codec, 3);
    s.lengths = {8192};
    v.push_back(
        step(fmt::format("{} and {} 9/3 heads of 64, depth 8192", format_of(codec.k, ""), format_of(codec.v, "")), s,
             8192, false));
  }
  const auto batch_of = [](int batch, int context, int page) {
    AttendShape s = bf16_shape(batch, 8, 128, page, 4);
    s.lengths = {context};
    return s;
  };
  for (const int page : {16, 32})
    for (const auto& [batch, context] : {std::pair{8, 32768}, {40, 10240}, {1, 131072}, {1, 32768}})
      v.push_back(step(fmt::format("bf16 32/8 heads of 128, {} x {}, page {}", batch, context, page),
                       batch_of(batch, context, page), std::int64_t{batch} * context, true));
  for (const auto& [batch, context, page, all] : {std::tuple{8, 32768, 16, true},
                                                  {32, 4096, 16, true},
                                                  {8, 32768, 32, false},
                                                  {1, 32768, 16, false},
                                                  {32, 4096, 32, false},
                                                  {32, 16384, 16, false},
                                                  {32, 16384, 32, false}})
    for (const auto& [name, codec, always] : {std::tuple{"bf16", plain, true},
                                              {"k8v8", codes, true},
                                              {"k8v4", CodecSpec{{8}, {4}}, false},
                                              {"k4v4", CodecSpec{{4}, {4}}, true},
                                              {"k4v2", CodecSpec{{4}, {2}}, false},
                                              {"fp8", CodecSpec{fp8, fp8}, false}}) {
      if (!(all || always) || (codec == plain && context == 32768)) continue;
      AttendShape s = batch_of(batch, context, page);
      s.options.codec = codec;
      v.push_back(step(fmt::format("{} 32/8 heads of 128, {} x {}, page {}", name, batch, context, page), s,
                       std::int64_t{batch} * context, true));
    }
  for (const auto& [name, codec] : {std::pair{"bf16", plain}, {"int8", codes}}) {
    AttendShape s = batch_of(40, 1024, 16);
    s.options.codec = codec;
    s.options.rope = RopeRegime::cache_relative;
    v.push_back(step(fmt::format("{} cache_relative 32/8 heads of 128, 40 x 1024, page 16", name), s, 40 * 1024, true));
  }
  for (const auto& [name, codec] : {std::pair{"bf16", plain}, {"k8v4", CodecSpec{{8}, {4}}}}) {
    AttendShape s = batch_of(64, 1024, 16);
    s.options.codec = codec;
    v.push_back(step(fmt::format("{} 32/8 heads of 128, 64 x 1024, page 16", name), s, 64 * 1024, true));
  }
  for (const auto& [batch, context] : {std::pair{8, 32768}, {32, 4096}, {64, 1024}}) {
    AttendShape s = batch_of(batch, context, 16);
    s.options.codec = {{8}, {4}};
    s.lower = CodecSpec{{4}, {2}};
    v.push_back(step(fmt::format("k8v4, 56 % in k4v2 32/8 heads of 128, {} x {}, page 16", batch, context), s,
                     std::int64_t{batch} * context, true));
  }
  for (const auto& [name, codec, batch, context] : {std::tuple{"bf16", CodecSpec{}, 1, 32768},
                                                    {"bf16", CodecSpec{}, 8, 32768},
                                                    {"k8v4, 56 % in k4v2", CodecSpec{{8}, {4}}, 8, 32768},
                                                    {"k8v4, 56 % in k4v2", CodecSpec{{8}, {4}}, 64, 1024}}) {
    AttendShape s = batch_of(batch, context, 16);
    s.options.codec = codec;
    s.options.state_columns = 1;
    if (codec.k.bits) s.lower = CodecSpec{{4}, {2}};
    v.push_back(step(fmt::format("mass into state, {} 32/8 heads of 128, {} x {}, page 16", name, batch, context), s,
                     std::int64_t{batch} * context, true));
  }
  // A head under a budget of 2048 tokens, with the step's token.
  for (const auto& [name, columns, late] :
       {std::tuple{"bf16", 0, false}, {"mass into state, bf16", 1, false}, {"mass left, bf16", 1, true}})
    for (const int batch : {1, 8}) {
      AttendShape s = batch_of(batch, 2049, 16);
      s.options.state_columns = columns;
      v.push_back(step(fmt::format("{} 32/8 heads of 128, {} x 2049, page 16", name, batch), s,
                       std::int64_t{batch} * 2049, true, late));
    }
  const std::vector<int> ragged = ragged_lengths();
  AttendShape many = bf16_shape(64, 8, 128, 16, 4);
  for (const int n : ragged) many.lengths.insert(many.lengths.end(), 8, n);
  v.push_back(step(fmt::format("ragged: 64 sequences of {} to {}, page 16", *std::ranges::min_element(ragged),
                               *std::ranges::max_element(ragged)),
                   many, std::accumulate(ragged.begin(), ragged.end(), std::int64_t{0}), true));
  for (const int selected : {1024, 2048}) {
    AttendShape s = batch_of(40, 10240, 16);
    s.chosen = selected / 16;
    v.push_back(
        step(fmt::format("40 x {} selected of 10240, page 16", selected), s, std::int64_t{40} * selected, true));
  }
}

// Mass that attention of some layers has left. A run adds it once for all of them, with the last layer.
class LateScene final : public Scene {
 public:
  // One cache has the rows of all layers, as a store has them.
  LateScene(Place& place, AttendShape shape, int layers)
      : place_(place),
        layers_(layers),
        rows_(shape.options.rows),
        scene_(of_layers(shape, layers), 11),
        all_(scene_.put(place)) {
    const int heads = scene_.heads(), kv_heads = shape.options.kv_heads;
    for (int r = rows_ - 1; r >= 0; --r) slots_.push_back(r);
    slots_there_ = place.put(slots_);
    all_.out = View<float, 3>::dense(place.take<float>(scene_.q.size()), all_.queries.extent);
    const auto mass = static_cast<std::size_t>(std::int64_t{rows_} * heads * scene_.room);
    all_.mass = View<float, 3>::dense(place.take<float>(mass), {rows_, heads, scene_.room});
    const auto bytes = static_cast<std::size_t>(ops::LateMass::bytes(rows_, heads, kv_heads, scene_.room));
    auto* room = place.take<std::byte>(bytes * static_cast<std::size_t>(layers));
    for (int l = 0; l < layers; ++l) {
      ops::LateMass& late = late_.emplace_back();
      late.room = room + static_cast<std::size_t>(l) * bytes, late.tokens = scene_.room;
      attend(l, {0, GroupRule::mean}, &late);
    }
  }
  void run(int layer) override {
    if (layer + 1 == layers_) only_on_cuda<ops::add_late_mass>(late_, place_.stream());
  }
  void check(Check& check) override {
    for (int l = 0; l < layers_; ++l) {
      attend(l, {1, GroupRule::mean}, nullptr);
      attend(l, {2, GroupRule::mean}, &late_[static_cast<std::size_t>(l)]);
    }
    only_on_cuda<ops::add_late_mass>(late_, place_.stream());
    check.that("a launch adds what attention adds", sums(1) == sums(2));
    check.that("it adds something", std::ranges::any_of(sums(1), [](float x) { return x > 0; }));
    for (ops::LateMass& late : late_) late.into.column = 0;
  }

 private:
  static AttendShape of_layers(AttendShape s, int layers) {
    s.options.rows *= layers, s.options.state_columns = 3;
    return s;
  }
  void attend(int layer, ops::MassColumn into, ops::LateMass* late) {
    ops::AttendArgs a = all_;
    const std::int64_t first = std::int64_t{layer} * rows_;
    a.kv.table.data += first * a.kv.table.stride[0], a.kv.length.data += first * a.kv.length.stride[0];
    a.kv.slots = slots_there_, a.kv.rows = rows_;
    a.queries.data += first * a.queries.stride[0], a.out.data += first * a.out.stride[0];
    a.queries.extent[0] = a.out.extent[0] = rows_;
    a.last += first;
    a.mass_into = into, a.late = late;
    ops::attend(a, scene_.workspace, place_.stream());
    if (late && !late->left) throw Error(Errc::internal, "got attention that adds its mass, wanted it left");
  }
  std::vector<float> sums(int column) {
    const std::int64_t rows = all_.kv.rows, heads = all_.kv.kv_heads;
    std::vector<float> zeros(static_cast<std::size_t>(rows * heads * scene_.room));
    const Scores out = place_.put(View<float, 3>::dense(zeros.data(), {rows, heads, scene_.room}));
    ops::read_state({&all_.kv, column}, out, place_.stream());
    return place_.get(out);
  }

  Place& place_;
  int layers_, rows_;
  AttendScene scene_;
  ops::AttendArgs all_;
  std::vector<std::int32_t> slots_;
  const std::int32_t* slots_there_;
  std::vector<ops::LateMass> late_;
};

Case late(const std::string& name, const AttendShape& s) {
  Case c{"late_mass", name};
  c.make = [=](Place& place, int layers) { return std::make_unique<LateScene>(place, s, std::max(layers, 3)); };
  c.cpu = false;
  return c;
}

void add_late(std::vector<Case>& v) {
  for (const auto& [dim, page, group, codec] :
       {std::tuple{128, 16, 4, plain}, {64, 32, 1, plain}, {128, 16, 3, codes}}) {
    AttendShape s = shape_of(2, 3, dim, page, DType::bf16, codec, group);
    s.lengths = {70, 0, 1100, 16, 2500};
    v.push_back(late(name_of(s) + ", all layers in a launch", s));
  }
  // A line has the time of one layer of Llama-3.1-8B, of heads with a budget of 2048 tokens and the step's own.
  for (const int rows : {1, 8}) {
    AttendShape s = bf16_shape(rows, 8, 128, 16, 4);
    s.lengths = {2049};
    Case c = late(fmt::format("32/8 heads of 128, {} x 2049, page 16, all layers in a launch", rows), s);
    c.timed_cuda = true;
    c.copies = 32;
    c.work.bytes = 8. * rows * 2049 * (9 + 8);  // shares, and the column twice
    v.push_back(std::move(c));
  }
}

std::vector<Case> list() {
  std::vector<Case> v;
  add_storages(v);
  add_pipelined(v);
  add_turned(v);
  add_clamped(v);
  add_half(v);
  add_shares(v);
  add_parts(v);
  add_tokens(v);
  v.push_back(checked("attend", "random caches", check_random_caches));
  add_nan(v);
  add_codes(v);
  add_steps(v);
  add_two_codecs(v);
  add_sums(v);
  add_late(v);
  add_logits(v);
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
