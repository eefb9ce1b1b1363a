// Attention of prompts.
#include "ops/attend/attend_prompt.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <tuple>

#include "base/half.hpp"
#include "cases/case.hpp"
#include "cases/prompt_scene.hpp"
#include "cases/quick.hpp"
#include "cases/relative_error.hpp"
#include "ops/attend/attend_prompt_forms.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

// Sums of f32 in another order.
constexpr double cpu_f32 = 1e-5;
// A GPU multiplies matrices of bf16. The norm of the difference grows by half a bit if the output is rounded too.
constexpr double cuda_output = 6e-3, cuda_rounded = 9e-3;

void compare_on_cpu(Place& place, Check& check, PromptScene& scene) {
  ops::PromptArgs a = scene.put(place);
  const auto run = [&](bool sums, const auto& op) {
    ops::PromptArgs b = a;
    b.out = place.unwritten(a.queries.extent);
    if (sums) b.sums = place.unwritten<2>({scene.heads(), scene.longest()});
    PoisonedScratch w;
    op(b, w);
    return PromptOutputs{place.get(b.out), sums ? place.get(b.sums) : std::vector<float>{}};
  };
  const auto f32 = [&](const ops::PromptArgs& b, Workspace& w) { ops::attend_prompt(b, w, place.stream()); };
  const PromptOutputs wanted = scene.reference(scene.args()), got = run(true, f32);
  check.equal("out", got.out, wanted.out, cpu_f32);
  check.equal("sums", got.sums, wanted.sums, cpu_f32);
  check.that("without sums the output has the same bits", run(false, f32).out == got.out);
  if (scene.shape.options.dtype != DType::bf16) return;

  // Tiles of bf16. With a scale that is a power of two no score loses a bit.
  ops::PromptArgs exact = scene.args();
  a.softmax_scale = exact.softmax_scale = std::exp2(-std::round(std::log2(static_cast<float>(scene.dim())) / 2));
  const PromptOutputs plain = scene.reference(exact);
  for (const auto& [name, product] : {std::pair{"portable", ops::gemm::PairProduct{ops::gemm::portable_pair_product}},
                                      {"AMX", ops::gemm::amx_pair_product()}}) {
    if (!product) continue;
    const auto scope = check.in(fmt::format("{} products of bf16", name));
    const auto rounded = [&, of = product](const ops::PromptArgs& b, Workspace& w) {
      ops::attend_prompt_bf16(b, w, of);
    };
    const PromptOutputs narrow = run(true, rounded);
    check.equal("out", narrow.out, plain.out, scene.largest_value() / 512);  // a probability loses at most 2^-9 of it
    check.equal("sums", narrow.sums, plain.sums, cpu_f32);
  }
}

std::vector<float> widened(const std::vector<std::uint16_t>& from, bool half) {
  std::vector<float> out;
  for (const std::uint16_t x : from) {
    bf16 b;
    b.bits = x;
    out.push_back(half ? half_to_float(x) : static_cast<float>(b));
  }
  return out;
}

void compare_on_cuda(Place& place, Check& check, PromptScene& scene) {
  const PromptOutputs wanted = scene.reference(scene.args());
  const PromptShape& shape = scene.shape;
  if (shape.half) scene.cache.to_half();
  ops::PromptArgs a = scene.put(place);
  const std::array<std::int64_t, 3> extent = a.queries.extent;
  const std::size_t room = static_cast<std::size_t>(ops::prompt_room(shape.tokens) * scene.heads() * scene.dim());
  HeapWorkspace w;
  const auto run = [&](const ops::PromptArgs& b) {
    check.that("the kernel takes the chunk", ops::attend_prompt(b, w, place.stream()));
  };
  for (const bool sums : {false, true}) {
    const auto scope = check.in(sums ? "with sums" : "without sums");
    a.out = place.unwritten(extent);
    a.sums = sums ? place.unwritten<2>({scene.heads(), scene.longest()}) : View<float, 2>{};
    if (sums && a.masks) {
      check.that("masks do not go with sums", !ops::attend_prompt(a, w, place.stream()));
      continue;
    }
    run(a);
    const std::vector<float> out = place.get(a.out);
    check.within("out", relative(out, wanted.out), cuda_output);
    std::vector<float> first;
    if (sums) {
      first = place.get(a.sums);
      check.within("sums", relative(first, wanted.sums), cuda_output);
    }
    ops::PromptArgs narrow = a;
    auto* rounded = place.put(std::vector<std::uint16_t>(room, 0xffff));
    narrow.rounded = rounded;
    run(narrow);
    const auto written = View<const std::uint16_t, 1>::dense(rounded, {static_cast<std::int64_t>(out.size())});
    check.within("rounded out", relative(widened(place.get(written), shape.half), wanted.out), cuda_rounded);
    if (sums) check.equal("sums of the next call", place.get(a.sums), first, 0);
    if (sums || shape.kernel != ops::PromptKernel::cudnn) continue;

    // It takes rounded queries in place of the f32 ones, which are NaN.
    std::vector<std::uint16_t> queries(room, 0xffff);
    for (std::size_t i = 0; i < scene.q.size(); ++i)
      queries[i] = shape.half ? float_to_half(scene.q[i]) : bf16(scene.q[i]).bits;
    ops::PromptArgs given = a;
    given.rounded_queries = place.put(queries);
    given.queries = place.unwritten(extent);
    given.out = place.unwritten(extent);
    run(given);
    check.that("rounded queries give the same bits", place.get(given.out) == out);
  }
}

void compare(Place& place, Check& check, const PromptShape& shape) {
  PromptScene scene(shape);
  place.stream().device() == Device::cpu ? compare_on_cpu(place, check, scene) : compare_on_cuda(place, check, scene);
}

// No shortcut of the softmax may hide a NaN that attention reads.
void check_nan(Place& place, Check& check, const PromptShape& shape) {
  const int spoilt_head = 1, element = 7;
  for (const bool bf16_products : {false, true})
    for (const int at : {0, 33, shape.tokens - 1})
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        PromptScene scene(shape);
        scene.cache.set(0, spoilt_head, at, side, element, std::numeric_limits<float>::quiet_NaN());
        ops::PromptArgs a = scene.put(place);
        std::vector<float> zero(scene.q.size());
        a.out = place.put(View<float, 3>::dense(zero.data(), a.queries.extent));
        a.sums = place.put(View<float, 2>::dense(zero.data(), {scene.heads(), shape.tokens}));
        a.round_to_bf16 = bf16_products;
        PoisonedScratch w;
        ops::attend_prompt(a, w, place.stream());
        const std::vector<float> out = place.get(a.out), sums = place.get(a.sums);
        bool reads = true, others = true, summed = true;
        for (std::size_t i = 0; i < out.size(); ++i) {
          const auto d = static_cast<int>(i) % scene.dim(), row = static_cast<int>(i) / scene.dim();
          const int token = row / scene.heads(), head = row % scene.heads() / shape.group;
          if (head != spoilt_head)
            others = others && std::isfinite(out[i]);
          else if (token >= at && d == element)
            reads = reads && std::isnan(out[i]);
        }
        for (int h = 0; h < scene.heads(); ++h)
          summed = summed && std::isnan(sums[static_cast<std::size_t>(h * shape.tokens)]) ==
                                 (h / shape.group == spoilt_head && side == KvSide::key);
        const auto scope = check.in(fmt::format("{} of token {}{}", side == KvSide::key ? "key" : "value", at,
                                                bf16_products ? ", products of bf16" : ""));
        check.that("NaN is in the outputs of the tokens that read it", reads);
        check.that("other heads have none", others);
        check.that("NaN is in the sums that read it, and in no others", summed);
      }
}

PromptShape shape_of(DType dtype, int kv_heads, int dim, int page, int group, std::vector<int> past, int tokens) {
  PromptShape s;
  s.options.kv_heads = kv_heads, s.options.head_dim = dim, s.options.page_size = page, s.options.dtype = dtype;
  s.group = group;
  s.past = std::move(past), s.tokens = tokens;
  return s;
}

// What attend_prompt leaves to attend on a GPU.
bool cuda_takes(const PromptShape& s) {
  const int dim = s.options.head_dim, page = s.options.page_size;
  return s.options.dtype == DType::bf16 && s.window == 0 && (dim == 64 || dim == 96 || dim == 128 || dim == 256) &&
         (page > 8 || dim != 96);
}

void add(std::vector<Case>& v, const PromptShape& s) {
  const PagedOptions& o = s.options;
  std::string name =
      fmt::format("{} {}/{} heads of {}, page {}, {} tokens after {}",
                  s.half                   ? "f16"
                  : o.dtype == DType::bf16 ? "bf16"
                                           : "f32",
                  o.kv_heads * s.group, o.kv_heads, o.head_dim, o.page_size, s.tokens, fmt::join(s.past, " "));
  if (s.window) name += fmt::format(", window {}", s.window);
  if (s.gap != 1) name += fmt::format(", positions {} apart", s.gap);
  for (const PromptMask& m : s.masks) name += fmt::format(", mask {} + {}", m.sinks, m.window);
  const bool cudnn = s.kernel == ops::PromptKernel::cudnn;
  Case c = checked("prefill_attention", name, [s](Place& place, Check& check) { compare(place, check, s); });
  if (cudnn)
    c.make = [make = c.make](Place& place, int copies) {
      return ops::cudnn_state().there ? make(place, copies) : nullptr;
    };
  c.kernel = cudnn ? "cudnn" : "";
  c.cpu = !cudnn;
  c.cuda = cuda_takes(s);
  v.push_back(std::move(c));
}

void add_sizes(std::vector<Case>& v) {
  unsigned n = 0;
  for (const int dim : {64, 96, 128, 256})
    for (const int page : {8, 16, 32, 64}) {
      const int group = std::array{1, 3, 4, 7}[++n % 4];
      if (quick() && n % 3) continue;
      add(v, shape_of(DType::bf16, 2, dim, page, group, {0}, 45));
      add(v, shape_of(DType::bf16, 2, dim, page, group, {70, 3}, 37));
    }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int group : {1, 3, 4, 7})
      for (const int dim : {16, 64, 80, 128}) {
        if (quick() && (group + dim / 16) % 3) continue;
        add(v, shape_of(dtype, 2, dim, 16, group, {0}, 61));
        add(v, shape_of(dtype, 2, dim, 16, group, {37}, 24));
      }
    add(v, shape_of(dtype, 2, 64, 16, 3, {0}, 1));
    add(v, shape_of(dtype, 2, 64, 16, 3, {40}, 1));
    add(v, shape_of(dtype, 1, 16, 16, 100, {5}, 3));
    add(v, shape_of(dtype, 1, 8, 16, 1, {300}, 420));
    add(v, shape_of(dtype, 3, 64, 16, 3, {33, 0, 7}, 20));
  }
}

// Chunks of one token, of whole tiles, with a long past.
void add_chunks(std::vector<Case>& v) {
  for (const auto& [past, tokens] :
       {std::pair{0, 1}, {15, 1}, {16, 1}, {0, 32}, {0, 64}, {64, 64}, {1000, 40}, {1, 300}})
    add(v, shape_of(DType::bf16, 1, 64, 16, 2, {past}, tokens));
  for (const int tokens : {ops::prompt_cudnn_rows - 1, ops::prompt_cudnn_rows}) {
    PromptShape s = shape_of(DType::bf16, 1, 64, 64, 1, {0}, tokens);
    s.kernel = ops::PromptKernel::best;
    add(v, s);
  }
}

void add_windows(std::vector<Case>& v) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int window : {1, 5, 64, 300, 1000}) {
      PromptShape whole = shape_of(dtype, 1, 16, 16, 3, {0}, 350), part = shape_of(dtype, 2, 16, 16, 2, {290}, 30);
      whole.window = part.window = window;
      add(v, whole);
      add(v, part);
    }
    // The window counts positions, not places.
    PromptShape sparse = shape_of(dtype, 1, 16, 16, 2, {60}, 10);
    sparse.gap = 3;
    sparse.window = 40;
    add(v, sparse);
  }
}

void add_masks(std::vector<Case>& v) {
  const std::vector<PromptMask> few = {{5, 20}, {0, 0}, {0, 1}}, wide = {{0, 0}, {33, 150}};
  for (const int dim : {16, 64, 96, 128, 256})
    for (const auto& [masks, past, tokens] :
         {std::tuple{few, std::vector{0}, 90}, {few, {70, 3, 0}, 37}, {wide, {0, 290}, 300}, {wide, {25, 7}, 450}}) {
      if (quick() && dim > 64) continue;
      PromptShape s = shape_of(DType::bf16, 3, dim, dim == 64 ? 8 : 16, dim == 128 ? 4 : 3, past, tokens);
      s.masks = masks;
      add(v, s);
    }
  PromptShape sparse = shape_of(DType::f32, 2, 64, 16, 2, {60}, 100);
  sparse.masks = few;
  sparse.window = 70;
  add(v, sparse);
  sparse.options.dtype = DType::bf16;
  sparse.window = 0;
  sparse.gap = 3;
  add(v, sparse);
}

// quick() takes every third shape.
void add_cudnn(std::vector<Case>& v) {
  unsigned n = 0;
  for (const bool half : {false, true})
    for (const int dim : {64, 96, 128})
      for (const int group : {1, 4})
        for (const auto& [tokens, past] : {std::pair{128, std::vector{0}}, {45, {0}}, {45, {70, 3}}, {200, {0, 131}}}) {
          if (n++ % 3 && quick()) continue;
          PromptShape s = shape_of(DType::bf16, 2, dim, 16, group, past, tokens);
          s.half = half;
          s.kernel = ops::PromptKernel::cudnn;
          add(v, s);
        }
}

void add_nan(std::vector<Case>& v) {
  for (const PromptShape& s :
       {shape_of(DType::f32, 2, 16, 4, 3, {0}, 70), shape_of(DType::bf16, 2, 64, 16, 3, {0}, 70)}) {
    Case c = checked("prefill_attention", fmt::format("NaN keys and values, heads of {}", s.options.head_dim),
                     [s](Place& place, Check& check) { check_nan(place, check, s); });
    c.cuda = cuda_takes(s);
    v.push_back(std::move(c));
  }
}

// One layer of a prompt at its size in a run.
class ChunkScene final : public Scene {
 public:
  ChunkScene(Place& place, const PromptShape& shape, bool sums)
      : place_(place), scene_(shape), workspace_(ledger_, place.stream()), args_(scene_.put(place)) {
    args_.round_to_bf16 = true;
    args_.out = View<float, 3>::dense(place.take<float>(scene_.q.size()), args_.queries.extent);
    const std::array<std::int64_t, 2> extent{scene_.heads(), scene_.longest()};
    if (sums)
      args_.sums = View<float, 2>::dense(place.take<float>(static_cast<std::size_t>(extent[0] * extent[1])), extent);
  }
  void run(int) override {
    if (!ops::attend_prompt(args_, workspace_, place_.stream()))
      throw Error(Errc::internal, "attend_prompt refuses the chunk of a timed case");
    workspace_.reset();
  }
  // The reference would take hours for all queries. It computes a few at the start, in the middle and at the end.
  void check(Check& check) override {
    run(0);
    constexpr int few = 4;
    const int tokens = scene_.shape.tokens;
    const std::vector<float> out = place_.get(args_.out);
    const std::size_t row = static_cast<std::size_t>(scene_.heads() * scene_.dim());
    for (const int begin : {0, tokens / 2, tokens - few}) {
      const PromptOutputs wanted = scene_.reference(scene_.args(begin, few));
      const auto from = out.begin() + static_cast<std::ptrdiff_t>(begin * row);
      const std::string queries = fmt::format("queries {} to {}", begin, begin + few - 1);
      compare_values(check, queries, {from, from + static_cast<std::ptrdiff_t>(few * row)}, wanted.out,
                     ops::gemm::amx_pair_product() ? scene_.largest_value() / 512 : cpu_f32);
      if (args_.sums && begin == tokens - few) check_sums(check, wanted.sums, few);
    }
  }

 private:
  void compare_values(Check& check, const std::string& what, const std::vector<float>& got,
                      const std::vector<float>& wanted, double on_cpu) const {
    if (place_.stream().device() == Device::cpu)
      check.equal(what, got, wanted, on_cpu);
    else
      check.within(what, relative(got, wanted), cuda_output);
  }
  // Only the last queries see the last places. The probabilities of each query sum to 1.
  void check_sums(Check& check, const std::vector<float>& of_last, int few) {
    const std::vector<float> sums = place_.get(args_.sums);
    const std::ptrdiff_t places = scene_.longest();
    std::vector<float> got, wanted, totals;
    for (int h = 0; h < scene_.heads(); ++h) {
      const auto end = (h + 1) * places;
      got.insert(got.end(), sums.begin() + end - few, sums.begin() + end);
      wanted.insert(wanted.end(), of_last.begin() + end - few, of_last.begin() + end);
      totals.push_back(static_cast<float>(std::accumulate(sums.begin() + end - places, sums.begin() + end, 0.0)));
    }
    compare_values(check, "sums of the last places", got, wanted, cpu_f32);
    compare_values(check, "sums of all places", totals,
                   std::vector<float>(totals.size(), static_cast<float>(scene_.shape.tokens)), cpu_f32);
  }

  Place& place_;
  PromptScene scene_;
  Ledger ledger_;
  StoreWorkspace workspace_;
  ops::PromptArgs args_;
};

Case chunk(const std::string& name, const PromptShape& shape, bool sums, const std::string& kernel) {
  Case c{"prefill_attention", name};
  c.make = [shape, sums](Place& place, int) -> std::unique_ptr<Scene> {
    if (shape.kernel == ops::PromptKernel::cudnn && !ops::cudnn_state().there) return nullptr;
    return std::make_unique<ChunkScene>(place, shape, sums);
  };
  c.work.reads = false;
  c.work.flops = (sums ? 6. : 4.) * shape.options.kv_heads * shape.group * shape.options.head_dim *
                 (shape.past[0] + 0.5 * (shape.tokens + 1)) * shape.tokens;
  c.kernel = kernel;
  c.runs = 10;
  c.cpu_runs = 5;
  return c;
}

// SmolLM2-135M's shape on the CPU, Llama-3.1-8B's on a GPU.
void add_timed(std::vector<Case>& v) {
  for (const int tokens : {2048, 8192})
    for (const bool sums : {false, true}) {
      Case c = chunk(fmt::format("9/3 heads of 64, {} tokens{}", tokens, sums ? ", mass" : ""),
                     shape_of(DType::bf16, 3, 64, 16, 3, {0}, tokens), sums,
                     ops::gemm::amx_pair_product() ? "amx bf16" : "f32");
      c.timed_cpu = true;
      c.work.bytes = 4. * tokens * 64 * (2 * 9 + 2 * 3);
      v.push_back(std::move(c));
    }
  for (const auto& [past, tokens] : {std::pair{0, 2048}, {0, 8192}, {0, 8000}, {0, 32768}, {28672, 4096}})
    for (const bool sums : {false, true})
      for (const auto& [kernel, name] :
           {std::pair{ops::PromptKernel::own, "own"}, {ops::PromptKernel::cudnn, "cudnn"}}) {
        PromptShape s = shape_of(DType::bf16, 8, 128, 16, 4, {past}, tokens);
        s.kernel = kernel;
        Case c = chunk(fmt::format("bf16 32/8 heads of 128, {} tokens{}{}", tokens,
                                   past ? fmt::format(" after {}", past) : "", sums ? ", sums" : ""),
                       s, sums, name);
        c.timed_cuda = true;
        v.push_back(std::move(c));
      }
}

std::vector<Case> list() {
  std::vector<Case> v;
  add_sizes(v);
  add_chunks(v);
  add_windows(v);
  add_masks(v);
  add_cudnn(v);
  add_nan(v);
  add_timed(v);
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
