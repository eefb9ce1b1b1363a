#include "ops/attend/attend_prompt.hpp"

#include <catch2/catch.hpp>

#include "base/log.hpp"
#include "base/text.hpp"
#include "cases/prompt_scene.hpp"

using namespace kvlab;
using namespace kvlab::cases;

TEST_CASE("cuda attend_prompt leaves what it cannot do to attend") {
  PagedOptions o;
  o.head_dim = 80, o.page_size = 16, o.dtype = DType::bf16;
  PagedFixture cache(o);
  std::mt19937 rng(1);
  cache.fill_random(0, 0, 3, rng);
  ops::PromptArgs a;
  a.kv = cache.view();
  HeapWorkspace w;
  CHECK_FALSE(ops::attend_prompt(a, w, Stream::cuda(nullptr)));
}

TEST_CASE("cuda cudnn: what it does of a long prompt is counted, and that it is missing is said") {
  PromptShape shape;
  shape.options.head_dim = 64, shape.options.page_size = 64, shape.options.dtype = DType::bf16;
  shape.kernel = ops::PromptKernel::best;
  const auto chunks_of = [&](int tokens) {
    const std::int64_t before = ops::cudnn_chunks();
    shape.tokens = tokens;
    PromptScene scene(shape);
    OnDevice device;
    HeapWorkspace w;
    ops::PromptArgs a = scene.put(device);
    a.out = device.unwritten(a.queries.extent);
    REQUIRE(ops::attend_prompt(a, w, device.stream()));
    device.synchronize();
    return ops::cudnn_chunks() - before;
  };
  CHECK(chunks_of(ops::prompt_cudnn_rows - 1) == 0);
  const LibraryState& cudnn = ops::cudnn_state();
  for (const char* time : {"first", "second"}) {  // every cell without cuDNN warns, not only the first
    CAPTURE(time);
    const log::Collected said;
    CHECK((chunks_of(ops::prompt_cudnn_rows) > 0) == cudnn.there);
    const std::string warnings = join(said.warnings());
    CHECK((warnings.find("without cuDNN (" + cudnn.text) != std::string::npos) == (!cudnn.there && !cudnn.off));
  }
}
