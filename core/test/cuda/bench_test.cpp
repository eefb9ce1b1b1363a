// The whole-model cases of `kvlab bench` run and report their bytes. The tests ignore their times.
#include <catch2/catch.hpp>

#include "bench/cases.hpp"

using namespace kvlab;

TEST_CASE("cuda bench: decode and prefill of a synthetic model") {
  const bench::ModelSetup setup{"synthetic/tiny", {{2, 40}}};
  const auto decode = bench::cuda_decode_cases(setup);
  REQUIRE(decode.size() == 2);
  CHECK(decode[0].kernel == "eager");
  CHECK(decode[1].kernel == "graph");
  // 2 layers of qkv 64 x 128, o 64 x 64, three of 64 x 128; the head 64 x 512; keys and values of 2 x 40 tokens.
  const double weights = 2. * (2 * (64 * 128 + 64 * 64 + 3 * 64 * 128) + 64 * 512), cache = 2. * 80 * 2 * 2 * 2 * 16;
  for (const auto& line : decode) {
    CHECK(line.bytes == weights + cache);
    CHECK(line.seconds > 0);
  }
  const auto prefill = bench::cuda_prefill_cases(setup);
  REQUIRE(prefill.size() == 1);
  CHECK(prefill[0].kernel == "cublaslt, own");  // too short for cuDNN
  CHECK(prefill[0].flops == (weights - 2. * 64 * 512) * 40 + 2. * 64 * 512 + 2. * 40 * 40 * 4 * 16 * 2);
}

TEST_CASE("cuda bench: pages come while decode steps run") {
  using cases::Recall;
  const auto lines = bench::cuda_recall_cases(
      {"synthetic/tiny", {{2, 40}}}, {{Recall::Way::memcpy_page, 8, 16}, {Recall::Way::double_buffers, 8, 16}});
  REQUIRE(lines.size() == 2);
  CHECK(lines[0].kernel == "memcpy a page");
  CHECK(lines[1].kernel == "double buffers");
  for (const auto& line : lines) {
    CHECK(line.bytes == 8 * 8192);
    CHECK(line.seconds > 0);
    CHECK(line.beside.step == "decode, synthetic/tiny, batch 2 at 40");
    CHECK(line.beside.alone > 0);
    CHECK(line.beside.beside > 0);
  }
}
