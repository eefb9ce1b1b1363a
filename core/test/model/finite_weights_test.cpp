// Weights that are NaN or infinite are refused by name before a cell runs.
#include <catch2/catch.hpp>
#include <limits>

#include "model/model.hpp"
#include "support/altered_checkpoint.hpp"
#include "support/golden.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();

std::unique_ptr<AlteredCheckpoint> tiny(const std::string& tensor, AlteredCheckpoint::Alter alter) {
  auto out = std::make_unique<AlteredCheckpoint>(open_checkpoint(golden("tiny/qwen2")));
  out->alter(tensor, std::move(alter));
  return out;
}

// The error of a model with `value` at [row, column] of a tensor.
std::string refusal(const std::string& tensor, std::int64_t row, std::int64_t column, float value, DType dtype) {
  return message_of([&] {
    const auto altered =
        tiny(tensor, [=](std::int64_t r, std::int64_t c, float x) { return r == row && c == column ? value : x; });
    load_model(*altered, dtype, "a model");
  });
}

}  // namespace

TEST_CASE("a weight that is not finite is refused with its tensor and place") {
  const auto plain = open_checkpoint(golden("tiny/qwen2"));
  const std::string layer = "model.layers.1.";
  for (const std::string& name :
       {std::string("model.embed_tokens.weight"), std::string("model.norm.weight"), layer + "input_layernorm.weight",
        layer + "post_attention_layernorm.weight", layer + "self_attn.q_proj.weight", layer + "self_attn.k_proj.weight",
        layer + "self_attn.v_proj.weight", layer + "self_attn.o_proj.weight", layer + "self_attn.v_proj.bias",
        layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight", layer + "mlp.down_proj.weight"}) {
    const auto shape = plain->shape(name);
    const std::int64_t rows = shape.size() > 1 ? shape[0] : 1, columns = shape.back();
    for (const auto& [row, column] :
         {std::pair<std::int64_t, std::int64_t>{0, 0}, {rows / 2, 1}, {rows - 1, columns - 1}})
      for (const float value : {nan_value, inf, -inf}) {
        CAPTURE(name, row, column, value);
        CHECK_THAT(refusal(name, row, column, value, DType::bf16),
                   Catch::StartsWith("a model: tensor " + name + ": got 1 of ") &&
                       Catch::Contains("the first at [" + std::to_string(row) + ", " + std::to_string(column) + "]"));
      }
  }
  CHECK(refusal("model.norm.weight", 0, 0, 3e38f, DType::f32) == "no error");
}

TEST_CASE("a weight that overflows in the run's dtype is refused") {
  // The largest bf16 is (2 - 2^-7) 2^127, the largest f16 65504. Half a step above that values round to infinity.
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  std::vector<float> row(static_cast<std::size_t>(open_checkpoint(golden("tiny/qwen2"))->shape(name)[1]));
  const auto read = [&](float value, DType dtype) {
    const auto altered = tiny(name, [=](std::int64_t, std::int64_t, float) { return value; });
    return message_of([&] { altered->read_weights(name, 3, 1, dtype, row.data()); });
  };
  const float most = std::numeric_limits<float>::max();
  CHECK(read(most, DType::f32) == "no error");
  CHECK_THAT(read(most, DType::bf16), Catch::Contains("NaN or infinite as bf16, the first at [3, 0]"));
  CHECK(read(static_cast<float>(0x1.fep127), DType::bf16) == "no error");
  CHECK(read(-65519.f, DType::f16) == "no error");
  CHECK_THAT(read(-65520.f, DType::f16), Catch::Contains("infinite as f16"));
  CHECK(read(65520.f, DType::bf16) == "no error");
}
