#include <fmt/format.h>

#include "bench/cases.hpp"
#include "bench/fixture.hpp"
#include "ops/attend/attend_prompt.hpp"
#include "ops/linear/linear_kernels.hpp"

namespace kvlab::bench {

std::vector<Line> prefill_attention_cases() {
  std::vector<Line> lines;
  for (const std::int64_t tokens : {2048, 8192})
    for (const bool mass : {false, true}) {
      const Pages empty(0);
      const auto q = randoms(tokens * query_heads * head_dim), k = randoms(tokens * kv_heads * head_dim);
      std::vector<float> out(q.size()), sums(static_cast<std::size_t>(query_heads * tokens));
      ops::PromptArgs a;
      a.kv = empty.layer(0);
      a.queries = View<const float, 3>::dense(q.data(), {tokens, query_heads, head_dim});
      a.keys = a.values = View<const float, 3>::dense(k.data(), {tokens, kv_heads, head_dim});
      a.out = View<float, 3>::dense(out.data(), {tokens, query_heads, head_dim});
      a.round_to_bf16 = true;
      if (mass) a.sums = View<float, 2>::dense(sums.data(), {query_heads, tokens});
      BenchWorkspace w;
      const Times t = time_runs(5, [&] {
        ops::attend_prompt(a, w, Stream::cpu());
        w.reset();
      });
      Line l{"prefill_attention", fmt::format("9/3 heads of 64, {} tokens{}", tokens, mass ? ", mass" : ""),
             ops::gemm::amx_pair_product() ? "amx bf16" : "f32", t.median, t.best};
      l.flops = (mass ? 6. : 4.) * query_heads * head_dim * 0.5 * static_cast<double>(tokens * (tokens + 1));
      l.bytes = 4. * static_cast<double>(tokens) * head_dim * (2 * query_heads + 2 * kv_heads);
      lines.push_back(l);
    }
  return lines;
}

}  // namespace kvlab::bench
