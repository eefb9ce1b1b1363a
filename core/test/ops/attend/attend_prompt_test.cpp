#include "ops/attend/attend.hpp"

#include <omp.h>

#include <kvlab/error.hpp>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "base/backend.hpp"
#include "base/buffer.hpp"
#include "cases/quick.hpp"
#include "ops/attend/attend_prompt_forms.hpp"
#include "ops/page/paged.hpp"

using namespace kvlab;

namespace {

// Scratch filled with NaN shows reads of unwritten entries.
class PoisonedScratch final : public Workspace {
 public:
  void* scratch(const char*, std::size_t bytes) override {
    blocks_.emplace_back(std::max<std::size_t>(bytes, 1));
    std::memset(blocks_.back().as<>(), 0xff, bytes);
    return blocks_.back().as<>();
  }
  void* state(const char*, std::size_t, int) override { return nullptr; }

 private:
  std::vector<Buffer> blocks_;
};

// A prompt of `past + chunk` tokens; the first `past` lie in pages.
struct Prompt {
  int query_heads, kv_heads, dim, past, chunk;
  std::vector<float> q, k, v, out;  // [token, head, dim] of the whole prompt
  PageLayout layout;
  std::vector<std::byte> memory;
  std::vector<PageEntry> table;
  std::vector<std::int32_t> length;
  std::int32_t slot = 0;

  Prompt(int group, int heads, int d, int past_tokens, int chunk_tokens, int stride = 1)
      : query_heads(group * heads), kv_heads(heads), dim(d), past(past_tokens), chunk(chunk_tokens) {
    std::mt19937 g(static_cast<unsigned>(group + 10 * d));
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& x, int n) {
      x.resize(static_cast<std::size_t>(past + chunk) * n * d);
      for (float& y : x) y = normal(g);
    };
    fill(q, query_heads);
    fill(k, kv_heads);
    fill(v, kv_heads);
    out.assign(q.size(), std::numeric_limits<float>::quiet_NaN());
    // Later tokens have larger queries, so their attention is sharper.
    for (std::size_t i = 0; i < q.size(); ++i) q[i] *= 1 + static_cast<float>(i) / static_cast<float>(q.size());
    layout = ops::make_layout(DType::f32, {}, 16, d, 0);
    const int pages = (past + 15) / 16;
    memory.resize(static_cast<std::size_t>(layout.bytes) * pages * heads);
    table.resize(static_cast<std::size_t>(std::max(pages, 1)) * heads);
    length.assign(static_cast<std::size_t>(heads), past);
    for (int h = 0; h < heads; ++h)
      for (int t = 0; t < past; ++t) {
        PageEntry& e = table[h * pages + t / 16];
        e.frame = static_cast<std::int32_t>((h * pages + t / 16) * (layout.bytes / granule_bytes));
        e.tokens = static_cast<std::uint16_t>(t % 16 + 1);
        write(t, h, stride);
      }
  }

  void write(int t, int h, int stride) {
    const PageEntry& e = table[h * ((past + 15) / 16) + t / 16];
    ops::write_token(memory.data() + std::int64_t{e.frame} * granule_bytes, layout, t % 16, row(k, t, h), row(v, t, h),
                     t * stride);
  }

  float* row(std::vector<float>& x, int t, int h) { return x.data() + (std::size_t(t) * kv_heads + h) * dim; }

  ops::PromptArgs args() {
    ops::PromptArgs a;
    const std::int64_t pages = std::max((past + 15) / 16, 1);
    a.kv.base = memory.data();
    a.kv.layouts = &layout;
    a.kv.table = View<const PageEntry, 3>::dense(table.data(), {1, kv_heads, pages});
    a.kv.length = View<const std::int32_t, 2>::dense(length.data(), {1, kv_heads});
    a.kv.slots = &slot;
    a.kv.rows = 1;
    a.kv.kv_heads = kv_heads;
    a.kv.head_dim = dim;
    a.kv.page_size = 16;
    a.queries =
        View<const float, 3>::dense(q.data() + std::int64_t{past} * query_heads * dim, {chunk, query_heads, dim});
    a.keys = View<const float, 3>::dense(row(k, past, 0), {chunk, kv_heads, dim});
    a.values = View<const float, 3>::dense(row(v, past, 0), {chunk, kv_heads, dim});
    a.out = View<float, 3>::dense(out.data() + std::int64_t{past} * query_heads * dim, {chunk, query_heads, dim});
    a.first = past;
    return a;
  }
};

struct Outcome {
  std::vector<float> out, mass;
};

enum class Form { fast, reference, bf16_portable, bf16_amx };

Outcome outcome(Prompt& p, ops::PromptArgs a, Form form, bool mass = true) {
  Outcome o;
  const std::int64_t keys = *std::max_element(p.length.begin(), p.length.end()) + p.chunk;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  o.mass.assign(static_cast<std::size_t>(p.query_heads * keys), nan);
  if (mass) a.sums = View<float, 2>::dense(o.mass.data(), {p.query_heads, keys});
  std::fill(p.out.begin(), p.out.end(), nan);
  PoisonedScratch w;
  switch (form) {
    case Form::fast: ops::attend_prompt(a, w, Stream::cpu()); break;
    case Form::reference: ops::attend_prompt_reference(a); break;
    case Form::bf16_portable: ops::attend_prompt_bf16(a, w, ops::gemm::portable_pair_product); break;
    case Form::bf16_amx: ops::attend_prompt_bf16(a, w, ops::gemm::amx_pair_product()); break;
  }
  o.out.assign(p.out.begin() + std::int64_t{p.past} * p.query_heads * p.dim, p.out.end());
  return o;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = a.size() == b.size() ? 0 : 1e30;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;  // neither form wrote it
    const double d = std::abs(double{a[i]} - double{b[i]}) / std::max(1.0, std::abs(double{b[i]}));
    worst = d == d ? std::max(worst, d) : 1e30;
  }
  return worst;
}

void check(Prompt& p, const ops::PromptArgs& a) {
  CAPTURE(p.query_heads, p.kv_heads, p.dim, p.past, p.chunk, a.window);
  const Outcome fast = outcome(p, a, Form::fast), slow = outcome(p, a, Form::reference);
  CHECK(difference(fast.out, slow.out) < 1e-5);
  CHECK(difference(fast.mass, slow.mass) < 1e-5);
  CHECK(outcome(p, a, Form::fast, false).out == fast.out);
  for (int h = 0; h < p.query_heads; ++h) {
    const std::size_t keys = fast.mass.size() / p.query_heads, own = p.length[h * p.kv_heads / p.query_heads] + p.chunk;
    double sum = 0;
    for (std::size_t j = 0; j < own; ++j) sum += fast.mass[h * keys + j];
    CHECK(sum == Approx(p.chunk).epsilon(1e-5));
  }
}

}  // namespace

TEST_CASE("the reference of prefill attention by hand") {
  Prompt p(1, 1, 8, 0, 2);
  std::fill(p.q.begin(), p.q.end(), 0.f);
  p.q[8] = 1;  // the second query looks at dimension 0
  std::fill(p.k.begin(), p.k.end(), 0.f);
  p.k[8] = std::log(3.f);  // the second key is three times as likely for it
  ops::PromptArgs a = p.args();
  a.softmax_scale = 1;
  const Outcome o = outcome(p, a, Form::reference);
  for (int d = 0; d < 8; ++d) {
    CHECK(o.out[d] == p.v[d]);
    CHECK(o.out[8 + d] == Approx(0.25 * p.v[d] + 0.75 * p.v[8 + d]));
  }
  CHECK(o.mass[0] == Approx(1.25));
  CHECK(o.mass[1] == Approx(0.75));
}

TEST_CASE("prefill attention equals its reference") {
  for (int group : {1, 3, 4, 7})
    for (int dim : {16, 64, 80, 128}) {
      if (kvlab::cases::quick() && (group + dim / 16) % 3) continue;
      Prompt p(group, 2, dim, 0, 61);
      check(p, p.args());
      Prompt q(group, 2, dim, 37, 24);
      check(q, q.args());
    }
  Prompt one(3, 2, 64, 0, 1), after(3, 2, 64, 40, 1), wide(100, 1, 16, 5, 3), many(1, 1, 8, 300, 420);
  check(one, one.args());
  check(after, after.args());
  check(wide, wide.args());
  check(many, many.args());
}

TEST_CASE("prefill attention with a sliding window") {
  for (int window : {1, 5, 64, 300, 1000}) {
    Prompt p(3, 1, 16, 0, 350), q(2, 2, 16, 290, 30);
    ops::PromptArgs a = p.args(), b = q.args();
    a.window = b.window = window;
    check(p, a);
    check(q, b);
  }
  // Gaps between the stored positions: the window counts positions, not places.
  Prompt sparse(2, 1, 16, 60, 10, 3);
  ops::PromptArgs a = sparse.args();
  a.first = 180;
  a.window = 40;
  check(sparse, a);
}

TEST_CASE("prefill attention over heads of different lengths") {
  Prompt p(3, 3, 64, 33, 20);
  p.length = {33, 0, 7};
  check(p, p.args());
}

TEST_CASE("prefill attention depends neither on threads nor on how the prompt is cut") {
  const int total = 600;
  const Form form = GENERATE(Form::fast, Form::bf16_portable);
  Prompt whole(3, 2, 32, 0, total);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const Outcome one = outcome(whole, whole.args(), form);
  omp_set_num_threads(3);
  const Outcome three = outcome(whole, whole.args(), form);
  omp_set_num_threads(threads);
  CHECK(one.out == three.out);
  CHECK(one.mass == three.mass);
  for (int past : {1, 100, 513}) {
    Prompt rest(3, 2, 32, past, total - past);  // the shape seeds the generator, so the numbers are the same
    REQUIRE(rest.k == whole.k);
    const Outcome o = outcome(rest, rest.args(), form);
    CHECK(std::equal(o.out.begin(), o.out.end(), one.out.begin() + std::int64_t{past} * rest.query_heads * rest.dim));
  }
}

// With bf16 operands the scores are as in f32. Only the probabilities lose bits, at most 2^-9 each.
void check_bf16(Prompt& p, int window = 0) {
  CAPTURE(p.query_heads, p.kv_heads, p.dim, p.past, p.chunk, window);
  for (std::vector<float>* x : {&p.q, &p.k, &p.v})
    for (float& y : *x) y = float(bf16(y));
  for (int h = 0; h < p.kv_heads; ++h)
    for (int t = 0; t < p.past; ++t) p.write(t, h, 1);
  ops::PromptArgs a = p.args();
  a.softmax_scale = 0.25f;
  a.window = window;
  const Outcome slow = outcome(p, a, Form::reference), portable = outcome(p, a, Form::bf16_portable);
  float largest = 0;
  for (float v : p.v) largest = std::max(largest, std::abs(v));
  CHECK(difference(portable.mass, slow.mass) < 1e-5);
  CHECK(difference(portable.out, slow.out) < largest / 512);
  if (!ops::gemm::amx_pair_product()) return;
  const Outcome amx = outcome(p, a, Form::bf16_amx);
  CHECK(difference(amx.mass, slow.mass) < 1e-5);
  CHECK(difference(amx.out, slow.out) < largest / 512);
}

TEST_CASE("prefill attention with operands in bf16 equals its reference") {
  if (!ops::gemm::amx_pair_product()) WARN("no AMX here: its tiles are not tested, the portable ones are");
  for (int group : {1, 3, 4, 7})
    for (int dim : {16, 64, 80, 128}) {
      if (kvlab::cases::quick() && (group + dim / 16) % 3) continue;
      Prompt p(group, 2, dim, 0, 61), q(group, 2, dim, 37, 24);
      check_bf16(p);
      check_bf16(q);
    }
  Prompt one(3, 2, 64, 0, 1), after(3, 2, 64, 40, 1), wide(100, 1, 16, 5, 3), many(1, 1, 8, 300, 420);
  for (Prompt* p : {&one, &after, &wide, &many}) check_bf16(*p);
  Prompt p(3, 1, 16, 0, 350), q(2, 2, 16, 290, 30);
  for (int window : {5, 64, 300}) {
    check_bf16(p, window);
    check_bf16(q, window);
  }
}

TEST_CASE("prefill attention refuses shapes that do not fit") {
  Prompt p(2, 2, 16, 20, 4);
  PoisonedScratch w;
  ops::PromptArgs a = p.args();
  a.keys.extent[1] = 3;
  CHECK_THROWS_AS(ops::attend_prompt(a, w, Stream::cpu()), Error);
  a = p.args();
  a.queries.extent[1] = a.out.extent[1] = 3;
  CHECK_THROWS_AS(ops::attend_prompt(a, w, Stream::cpu()), Error);
  a = p.args();
  a.sums = View<float, 2>::dense(p.out.data(), {4, 20});
  CHECK_THROWS_AS(ops::attend_prompt(a, w, Stream::cpu()), Error);
  if (!cuda_backend()) CHECK_THROWS_AS(ops::attend_prompt(p.args(), w, Stream::cuda(nullptr)), Error);
}
