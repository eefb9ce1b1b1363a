#include "ops/attend/attend_prompt.hpp"

#include <omp.h>

#include <kvlab/error.hpp>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "base/backend.hpp"
#include "cases/prompt_scene.hpp"
#include "ops/attend/attend_prompt_forms.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

PromptShape shape_of(int group, int kv_heads, int dim, int past, int tokens) {
  PromptShape s;
  s.options.kv_heads = kv_heads, s.options.head_dim = dim, s.options.page_size = 16;
  s.group = group, s.past = {past}, s.tokens = tokens;
  return s;
}

}  // namespace

TEST_CASE("the reference of prefill attention by hand") {
  // The second query looks at dimension 0. There the second key is three times as likely as the first.
  PromptScene scene(shape_of(1, 1, 8, 0, 2));
  std::vector<float> q(16, 0.f), k(16, 0.f), v(16), out(16), sums(2);
  q[8] = 1;
  k[8] = std::log(3.f);
  for (int d = 0; d < 16; ++d) v[d] = static_cast<float>(d * d);
  ops::PromptArgs a = scene.args();
  a.queries = View<const float, 3>::dense(q.data(), {2, 1, 8});
  a.keys = View<const float, 3>::dense(k.data(), {2, 1, 8});
  a.values = View<const float, 3>::dense(v.data(), {2, 1, 8});
  a.out = View<float, 3>::dense(out.data(), {2, 1, 8});
  a.sums = View<float, 2>::dense(sums.data(), {1, 2});
  a.softmax_scale = 1;
  ops::attend_prompt_reference(a);
  for (int d = 0; d < 8; ++d) {
    CHECK(out[d] == v[d]);
    CHECK(out[8 + d] == Approx(0.25 * v[d] + 0.75 * v[8 + d]));
  }
  CHECK(sums[0] == Approx(1.25));
  CHECK(sums[1] == Approx(0.75));
}

TEST_CASE("prefill attention depends neither on threads nor on how the prompt is cut") {
  const int total = 600;
  const bool bf16_products = GENERATE(false, true);
  PromptScene scene(shape_of(3, 2, 32, 0, total));
  const auto outputs = [&](const ops::PromptArgs& args) {
    return scene.outputs(args, [&](const ops::PromptArgs& a) {
      PoisonedScratch w;
      if (bf16_products)
        ops::attend_prompt_bf16(a, w, ops::gemm::portable_pair_product);
      else
        ops::attend_prompt(a, w, Stream::cpu());
    });
  };
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const PromptOutputs one = outputs(scene.args());
  omp_set_num_threads(3);
  const PromptOutputs three = outputs(scene.args());
  omp_set_num_threads(threads);
  CHECK(one.out == three.out);
  CHECK(one.sums == three.sums);
  for (const int past : {1, 100, 513}) {
    const PromptOutputs rest = outputs(scene.args(past, total - past));
    CHECK(std::equal(rest.out.begin(), rest.out.end(), one.out.begin() + past * scene.heads() * scene.dim()));
  }
}

TEST_CASE("prefill attention refuses shapes that do not fit") {
  PromptScene scene(shape_of(2, 2, 16, 20, 4));
  PoisonedScratch w;
  std::vector<float> out(scene.q.size());
  const auto args = [&] {
    ops::PromptArgs a = scene.args();
    a.out = View<float, 3>::dense(out.data(), a.queries.extent);
    return a;
  };
  ops::PromptArgs a = args();
  CHECK_NOTHROW(ops::attend_prompt(a, w, Stream::cpu()));
  a.keys.extent[1] = 3;
  CHECK_THROWS_AS(ops::attend_prompt(a, w, Stream::cpu()), Error);
  a = args();
  a.queries.extent[1] = a.out.extent[1] = 3;
  CHECK_THROWS_AS(ops::attend_prompt(a, w, Stream::cpu()), Error);
  a = args();
  a.sums = View<float, 2>::dense(out.data(), {4, 20});
  CHECK_THROWS_AS(ops::attend_prompt(a, w, Stream::cpu()), Error);
  if (!cuda_backend()) CHECK_THROWS_AS(ops::attend_prompt(args(), w, Stream::cuda(nullptr)), Error);
}
