#include "model/synthetic.hpp"

#include <algorithm>
#include <cmath>
#include <kvlab/error.hpp>

#include <catch2/catch.hpp>

#include "model/bundled.hpp"
#include "model/model.hpp"
#include "model/random_weights.hpp"

using namespace kvlab;

namespace {

double parameters_of(const std::string& model) {
  const auto c = open_synthetic(model);
  double parameters = 0;
  for (const std::string& name : c->names()) {
    double n = 1;
    for (const auto d : c->shape(name)) n *= static_cast<double>(d);
    parameters += n;
  }
  return parameters;
}

}  // namespace

TEST_CASE("every synthetic model has the tensors of its family") {
  for (const std::string& name : synthetic_names()) {
    CAPTURE(name);
    const auto c = open_synthetic(name);  // opening checks the tensors
    CHECK(c->config().heads % c->config().kv_heads == 0);
    CHECK(c->tokenizer()->vocab_size() == c->config().vocab);
    CHECK(c->fingerprint().size() == 16);
  }
  // As the models' cards have them: 8.03B, 23.6B, 32.8B and 32.8B.
  CHECK(parameters_of("llama-3.1-8b") == 8030261248);
  CHECK(parameters_of("mistral-small-24b") == Approx(23.6e9).epsilon(0.002));
  CHECK(parameters_of("qwen2.5-32b") == Approx(32.8e9).epsilon(0.002));
  CHECK(parameters_of("qwq-32b") == Approx(32.8e9).epsilon(0.002));
  const ModelConfig usual = open_synthetic("llama-3.1-8b")->config(),
                    longer = open_synthetic("llama-3.1-8b-256k")->config();
  CHECK(longer.context == 2 * usual.context);
  CHECK(parameters_of("llama-3.1-8b-256k") == parameters_of("llama-3.1-8b"));
}

TEST_CASE("synthetic weights: the same in any pieces, mean 0 and variance 1 / columns") {
  const auto c = open_synthetic("tiny");
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  const std::vector<float> all = c->read(name);
  const std::int64_t columns = c->shape(name)[1];
  std::vector<float> piece(static_cast<std::size_t>(3 * columns));
  c->read_rows(name, 5, 3, piece.data());
  CHECK(std::equal(piece.begin(), piece.end(), all.begin() + 5 * columns));
  CHECK(all != c->read("model.layers.0.mlp.down_proj.weight"));
  const auto random = c->random_tensor(name);
  REQUIRE(random);
  CHECK(all[7] == random_weight(random->seed, 7) * random->scale);
  double sum = 0, squares = 0;
  for (const float x : all) sum += x, squares += double{x} * x;
  const double n = static_cast<double>(all.size());
  CHECK(std::abs(sum / n) < 4 / std::sqrt(n * static_cast<double>(columns)));
  CHECK(squares / n * static_cast<double>(columns) == Approx(1).epsilon(0.05));
  CHECK(c->read("model.norm.weight") == std::vector<float>(64, 1.f));
  CHECK_FALSE(c->random_tensor("model.norm.weight"));
  CHECK_THROWS_AS(c->read("model.layers.2.mlp.down_proj.weight"), Error);
  CHECK_THROWS_AS(c->read_rows(name, 60, 5, piece.data()), Error);
}

TEST_CASE("random_weight by hand: odd multiples of sqrt(3) / 2^24, below sqrt(3)") {
  for (std::uint64_t i = 0; i < 1000; ++i) {
    const double odd = double{random_weight(1, i)} / 1.7320508075688772 * (1 << 24);
    CHECK(std::abs(odd) < (1 << 24) + 1.);
    CHECK(std::abs(odd - std::nearbyint(odd)) < 1.5);
  }
  CHECK(random_weight(1, 2) != random_weight(2, 2));
}

TEST_CASE("a synthetic model's tokenizer takes bytes") {
  const auto tokenizer = open_synthetic("tiny")->tokenizer();
  const std::string text = "a\xc3\xa9\xff b";
  const std::vector<int> ids = tokenizer->encode(text, true);
  CHECK(ids == std::vector<int>{'a', 0xc3, 0xa9, 0xff, ' ', 'b'});
  CHECK(tokenizer->decode(ids) == text);
  CHECK(tokenizer->decode(std::vector<int>{300}) == " #300");
  CHECK_THROWS_AS(tokenizer->token_bytes(512), Error);
  CHECK(tokenizer->eos_ids().empty());
}

TEST_CASE("a synthetic model by its path") {
  const auto model = load_model(*open_model("synthetic/tiny", "", "."), DType::bf16, "synthetic/tiny");
  CHECK(model->synthetic);
  CHECK(model->layers.size() == 2);
  CHECK_THROWS_WITH(open_model("synthetic/tini", "", "."), Catch::Contains("did you mean 'tiny'?"));
}
