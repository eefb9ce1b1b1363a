// Mass that a prompt's chunk gives the tokens near its queries.
#include "ops/retrieve/prompt_mass.hpp"

#include <fmt/format.h>

#include <cmath>
#include <tuple>

#include "cases/case.hpp"
#include "cases/prompt_scene.hpp"
#include "cases/quick.hpp"
#include "cases/relative_error.hpp"
#include "ops/page/reference.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

// A chunk as Policy::prefill gets it, with sums of blocks that hold something already.
struct Chunk {
  Place& place;
  PromptScene scene;
  Shape shape;
  Ledger ledger;
  StoreWorkspace workspace;
  std::vector<float> start;
  std::vector<std::int32_t> slots{0}, position;
  std::vector<float> made_lse_;

  Chunk(Place& at, const PromptShape& s)
      : place(at), scene(s), workspace(ledger, at.stream()), start(normals(room() * scene.heads(), 5)) {
    shape.query_heads = scene.heads(), shape.kv_heads = scene.kv_heads(), shape.head_dim = scene.dim();
    position = {scene.longest()};
  }
  std::int64_t room() const { return scene.longest() + 3; }
  KeyBlocks blocks(float* mass) const {
    KeyBlocks b;
    b.key = View<float, 4>::dense(mass, {1, scene.heads(), 0, scene.dim()});
    b.mass = View<float, 3>::dense(mass, {1, scene.heads(), room()});
    b.made = View<std::int32_t, 1>::dense(nullptr, {1});
    return b;
  }
  LayerPrefill layer(const PagedKv& kv, const float* queries) {
    const std::int64_t dim = scene.dim(), heads = scene.heads(), count = scene.shape.tokens;
    LayerPrefill l;
    l.shape = &shape;
    l.pages = kv;
    l.workspace = &workspace;
    l.slots = slots.data(), l.position = position.data();
    l.max_length = scene.longest();
    l.chunk_queries = View<const float, 4>{queries, {1, heads, count, dim}, {0, dim, heads * dim, 1}};
    return l;
  }
  // The logarithms of the chunk's softmaxes, plus `more`.
  View<const float, 3> made_lse(float more) {
    const PagedKv& kv = scene.cache.view();
    const std::int64_t dim = scene.dim(), heads = scene.heads(), count = scene.shape.tokens;
    std::vector<float> keys(static_cast<std::size_t>(scene.longest() * dim));
    made_lse_.clear();
    for (std::int64_t h = 0; h < heads; ++h) {
      ops::gather_rows_reference(kv, 0, static_cast<int>(h * scene.kv_heads() / heads), KvSide::key, scene.longest(),
                                 keys.data());
      for (std::int64_t i = 0; i < count; ++i) {
        double sum = 0;
        for (std::int64_t t = 0; t < scene.longest() - count + i + 1; ++t) {
          double x = 0;
          for (std::int64_t d = 0; d < dim; ++d)
            x += double{scene.q[static_cast<std::size_t>((i * heads + h) * dim + d)]} *
                 double{keys[static_cast<std::size_t>(t * dim + d)]};
          sum += std::exp(x / std::sqrt(static_cast<double>(dim)));
        }
        made_lse_.push_back(static_cast<float>(std::log(sum)) + more);
      }
    }
    return place.put(View<const float, 3>::dense(made_lse_.data(), {1, heads, count}));
  }
  // What attention leaves. Nothing where its kernel does not take the chunk.
  View<const float, 3> lse() {
    View<const float, 2> of;
    ops::PromptArgs a = scene.put(place);
    a.out = place.unwritten(a.queries.extent);
    a.lse = &of;
    if (place.stream().device() == Device::cpu || !ops::attend_prompt(a, workspace, place.stream())) return {};
    return {of.data, {1, of.extent[0], of.extent[1]}, {0, of.stride[0], of.stride[1]}};
  }
};

void compare(Place& place, Check& check, const PromptShape& s, int newest) {
  Chunk x(place, s);
  std::vector<float> wanted = x.start;
  ops::add_prompt_mass_reference(x.layer(x.scene.cache.view(), x.scene.q.data()), newest, x.blocks(wanted.data()));
  if (s.half) x.scene.cache.to_half();
  LayerPrefill l = x.layer(place.put(x.scene.cache.view(), x.scene.cache.arena_bytes()), place.put(x.scene.q));
  const View<const float, 3> lse = x.lse();
  const bool takes = (x.scene.dim() == 64 || x.scene.dim() == 128) && s.options.dtype == DType::bf16;
  check.that("attention leaves what the kernels need", !takes || place.stream().device() == Device::cpu || lse);
  for (const bool with : {true, false}) {
    if (with && !lse) continue;
    l.lse = with ? lse : View<const float, 3>{};
    const auto scope = check.in(with ? "with lse" : "without lse");
    for (int i = 0; i < (with ? 2 : 1); ++i) {
      float* mass = place.put(x.start);
      ops::add_prompt_mass(l, newest, x.blocks(mass), place.stream());
      const std::vector<float> got = place.get(View<const float, 1>::dense(mass, {std::ssize(x.start)}));
      // Tensor cores round no operand here. Attention's own sums take exponentials that are a little off.
      check.equal("mass", got, wanted, place.stream().device() == Device::cpu ? 1e-5 : 2e-3);
    }
  }
}

// The softmax is what the logarithms say: these are of twice the sums.
void compare_made(Place& place, Check& check, const PromptShape& s, int newest) {
  Chunk x(place, s);
  const float more = std::log(2.f);
  std::vector<float> wanted = x.start;
  ops::add_prompt_mass_reference(x.layer(x.scene.cache.view(), x.scene.q.data()), newest, x.blocks(wanted.data()));
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = x.start[i] + (wanted[i] - x.start[i]) / 2;
  LayerPrefill l = x.layer(place.put(x.scene.cache.view(), x.scene.cache.arena_bytes()), place.put(x.scene.q));
  l.lse = x.made_lse(more);
  float* mass = place.put(x.start);
  ops::add_prompt_mass(l, newest, x.blocks(mass), place.stream());
  check.equal("mass", place.get(View<const float, 1>::dense(mass, {std::ssize(x.start)})), wanted,
              place.stream().device() == Device::cpu ? 1e-5 : 2e-3);
}

PromptShape shape_of(DType dtype, int dim, int page, int group, int past, int tokens) {
  PromptShape s;
  s.options.kv_heads = 2, s.options.head_dim = dim, s.options.page_size = page, s.options.dtype = dtype;
  s.group = group, s.past = {past}, s.tokens = tokens;
  return s;
}

void add(std::vector<Case>& v, const PromptShape& s, int newest) {
  Case c = checked("prompt_mass",
                   fmt::format("{} {} heads of {}, page {}, {} tokens after {}, the newest {}{}",
                               s.half                           ? "f16"
                               : s.options.dtype == DType::bf16 ? "bf16"
                                                                : "f32",
                               2 * s.group, s.options.head_dim, s.options.page_size, s.tokens, s.past[0], newest,
                               s.kernel == ops::PromptKernel::cudnn ? ", cuDNN" : ""),
                   [s, newest](Place& place, Check& check) { compare(place, check, s, newest); });
  c.cpu = !s.half;
  v.push_back(std::move(c));
}

// One layer of a prompt at its size in a run, behind its attention.
class Timed final : public Scene {
 public:
  Timed(Place& place, const PromptShape& s, int newest)
      : x_(place, s),
        newest_(newest),
        layer_(x_.layer(place.put(x_.scene.cache.view(), x_.scene.cache.arena_bytes()), place.put(x_.scene.q))),
        mass_(place.put(x_.start)) {
    layer_.lse = x_.lse();
  }
  void run(int) override {
    ops::add_prompt_mass(layer_, newest_, x_.blocks(mass_), x_.place.stream());
    x_.workspace.reset();
  }
  // The reference would take hours. The other kernels take long, too, but are checked themselves.
  void check(Check& check) override {
    float *got = x_.place.put(x_.start), *wanted = x_.place.put(x_.start);
    LayerPrefill other = layer_;
    other.lse = {};
    ops::add_prompt_mass(layer_, newest_, x_.blocks(got), x_.place.stream());
    ops::add_prompt_mass(other, newest_, x_.blocks(wanted), x_.place.stream());
    x_.workspace.reset();
    const std::int64_t n = std::ssize(x_.start);
    check.equal("mass", x_.place.get(View<const float, 1>::dense(got, {n})),
                x_.place.get(View<const float, 1>::dense(wanted, {n})), 2e-3);
  }

 private:
  Chunk x_;
  int newest_;
  LayerPrefill layer_;
  float* mass_;
};

void add_timed(std::vector<Case>& v) {
  for (const auto& [past, tokens] : {std::pair{0, 32640}, {28672, 4096}})
    for (const int newest : {512, 4096}) {
      PromptShape s = shape_of(DType::bf16, 128, 32, 4, past, tokens);
      s.options.kv_heads = 8;
      s.kernel = ops::PromptKernel::best;
      Case c{"prompt_mass", fmt::format("32/8 heads of 128, {} tokens after {}, the newest {}", tokens, past, newest)};
      c.make = [s, n = newest](Place& place, int) -> std::unique_ptr<Scene> {
        return std::make_unique<Timed>(place, s, n);
      };
      c.work.reads = false;
      c.work.flops = 2. * 32 * 128 * newest * (tokens - (past ? 0 : newest / 2));
      c.timed_cuda = true;
      c.runs = 10;
      v.push_back(std::move(c));
    }
}

std::vector<Case> list() {
  std::vector<Case> v;
  for (const int dim : {64, 128})
    for (const auto& [past, tokens, newest] : {std::tuple{0, 1, 1},
                                               {0, 200, 31},
                                               {0, 200, 300},
                                               {70, 37, 20},
                                               {130, 270, 129},
                                               {300, 40, 1},
                                               {513, 300, 128},
                                               {0, 700, 100}}) {
      PromptShape s = shape_of(DType::bf16, dim, 16 << (tokens % 3), tokens % 2 ? 3 : 1, past, tokens);
      add(v, s, newest);
      if (tokens != 270) continue;
      s.half = true;
      add(v, s, newest);
    }
  PromptShape cudnn = shape_of(DType::bf16, 64, 16, 2, 40, 600);
  cudnn.kernel = ops::PromptKernel::best;
  add(v, cudnn, 70);
  // What other kernels take.
  add(v, shape_of(DType::bf16, 96, 16, 2, 30, 150), 50);
  add(v, shape_of(DType::f32, 16, 8, 2, 30, 150), 50);
  for (const auto& [dtype, dim, newest] :
       {std::tuple{DType::bf16, 64, 31}, {DType::bf16, 96, 50}, {DType::f32, 16, 9}}) {
    const PromptShape s = shape_of(dtype, dim, 16, 2, 30, 70);
    v.push_back(checked("prompt_mass", fmt::format("by given logarithms, heads of {}, the newest {}", dim, newest),
                        [s, n = newest](Place& place, Check& check) { compare_made(place, check, s, n); }));
  }
  add_timed(v);
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
