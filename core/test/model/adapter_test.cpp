#include "model/adapter.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "model/bundled.hpp"
#include "support/golden.hpp"
#include "test/model/tiny_models.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

const std::string layer = "base_model.model.model.layers.0.";

std::string config(const std::string& more = "", const std::string& targets = R"(["q_proj", "down_proj"])",
                   const std::string& rank = "2") {
  return R"({"peft_type": "LORA", "bias": "none", "r": )" + rank + R"(, "lora_alpha": 6, "target_modules": )" +
         targets + more + "}";
}

struct Named {
  std::string name;
  std::vector<std::uint64_t> shape;
};

std::vector<Named> tensors() {
  return {{layer + "self_attn.q_proj.lora_A.weight", {2, 8}},
          {layer + "self_attn.q_proj.lora_B.weight", {8, 2}},
          {layer + "mlp.down_proj.lora_A.weight", {2, 16}},
          {layer + "mlp.down_proj.lora_B.weight", {8, 2}}};
}

std::string adapter_file(const std::vector<Named>& named) {
  std::vector<TinyTensor> out;
  for (const Named& n : named) out.push_back({"", n.name, n.shape});
  return tiny_safetensors(out);
}

class Fixture {
 public:
  Fixture() {
    write_file(base_ / "config.json", tiny_config);
    write_file(base_ / "model.safetensors", tiny_safetensors());
    write_file(base_ / "tokenizer.json", tiny_tokenizer);
    write(config(), adapter_file(tensors()));
  }
  void write(const std::string& text, const std::string& weights) const {
    write_file(adapter_ / "adapter_config.json", text);
    write_file(adapter_ / "adapter_model.safetensors", weights);
  }
  std::unique_ptr<Checkpoint> base() const { return open_checkpoint(base_.path()); }
  std::unique_ptr<Checkpoint> merged() const { return merge_adapter(base(), adapter_.path()); }
  std::string refusal() const {
    try {
      merged();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  std::string refusal(const std::string& text) const {
    write(text, adapter_file(tensors()));
    return refusal();
  }
  std::string refusal(const std::vector<Named>& named) const {
    write(config(), adapter_file(named));
    return refusal();
  }
  const TempDir& folder() const { return adapter_; }

 private:
  TempDir base_, adapter_;
};

}  // namespace

TEST_CASE("an adapter's rows are W + alpha / r B A, by hand") {
  const Fixture f;
  const auto merged = f.merged(), base = f.base();
  // A is 0 .. 15 in two rows of 8, B 0 .. 15 in eight rows of 2, W 0 .. 63; alpha / r = 3.
  const std::vector<float> q = merged->read("model.layers.0.self_attn.q_proj.weight");
  CHECK(q[0] == 0 + 3 * (0 * 0 + 1 * 8));
  CHECK(q[7] == 7 + 3 * (0 * 7 + 1 * 15));
  CHECK(q[5 * 8 + 2] == 42 + 3 * (10 * 2 + 11 * 10));
  float row[8];
  merged->read_rows("model.layers.0.self_attn.q_proj.weight", 5, 1, row);
  CHECK(row[2] == q[42]);
  CHECK(merged->read("model.layers.0.mlp.down_proj.weight")[16 + 3] == 19 + 3 * (2 * 3 + 3 * 19));
  for (const char* name : {"model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"})
    CHECK(merged->read(name) == base->read(name));
  CHECK(merged->config().hidden == 8);
  CHECK(merged->tokenizer() != nullptr);
}

TEST_CASE("rank-stabilized adapters divide by the root of the rank; a pattern of targets takes what the file has") {
  const Fixture f;
  f.write(config(R"(, "use_rslora": true)"), adapter_file(tensors()));
  CHECK(f.merged()->read("model.layers.0.self_attn.q_proj.weight")[0] == Approx(6 / std::sqrt(2.) * 8));
  f.write(config("", R"("all-linear")"), adapter_file(tensors()));
  CHECK(f.merged()->read("model.layers.0.self_attn.q_proj.weight")[0] == 24);
}

TEST_CASE("an adapter's weights are part of the model's identity") {
  const Fixture f;
  const std::string first = f.merged()->fingerprint();
  CHECK(first != f.base()->fingerprint());
  CHECK(first == f.merged()->fingerprint());
  std::string other = adapter_file(tensors());
  other.back() = static_cast<char>(other.back() ^ 1);
  f.write(config(), other);
  CHECK(first != f.merged()->fingerprint());
}

TEST_CASE("an adapter with a weight that is not finite is refused by its tensor") {
  const Fixture f;
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    std::string bytes = adapter_file(tensors());  // the file ends with the last tensor's last element
    std::memcpy(bytes.data() + bytes.size() - sizeof value, &value, sizeof value);
    f.write(config(), bytes);
    CHECK_THAT(f.refusal(), Catch::Contains(layer + "mlp.down_proj.lora_B.weight: got 1 of 16 weights that are NaN or "
                                                    "infinite as f32, the first at [7, 1]"));
  }
}

TEST_CASE("adapters that do not fit are refused by name") {
  const Fixture f;
  const auto says = [](const std::string& text) { return Catch::Contains(text); };
  CHECK_THAT(f.refusal(config("", R"(["q_proj", "down_proj", "up_proj"])")),
             says("got no such tensor") && says("mlp.up_proj.lora_A.weight"));
  CHECK_THAT(f.refusal(config("", R"(["q_proj"])")), says("none of q_proj") && says("down_proj.lora_A"));
  CHECK_THAT(f.refusal(config("", R"(["q_proj", "down_proj", "c_attn"])")), says("'c_attn'") && says("target_modules"));
  CHECK_THAT(f.refusal(config("", R"(["q_proj", "down_proj"])", "4")), says("got shape [2, 16], wanted [4, 16]"));
  CHECK_THAT(f.refusal(config("", R"(["q_proj", "down_proj"])", "0")), says("got 0") && says(": r"));
  CHECK_THAT(f.refusal(config("", "3")), says("target_modules"));
  CHECK_THAT(f.refusal(config(R"(, "use_dora": true)")), says("use_dora"));
  CHECK_THAT(f.refusal(config(R"(, "modules_to_save": ["lm_head"])")), says("modules_to_save"));
  CHECK_THAT(f.refusal(R"({"peft_type": "IA3"})"), says("'IA3', wanted LORA"));
  CHECK_THAT(f.refusal(R"({"peft_type": "LORA", "r": 2, "target_modules": []})"), says("lora_alpha"));
  CHECK_THAT(f.refusal("["), says("adapter_config.json"));

  std::vector<Named> named = tensors();
  named.pop_back();
  CHECK_THAT(f.refusal(named), says("got no such tensor") && says("down_proj.lora_B.weight"));
  named = tensors();
  named[1].shape = {4, 4};
  CHECK_THAT(f.refusal(named), says("got shape [4, 4], wanted [8, 2]") && says("q_proj.lora_B"));
  named = tensors();
  named.push_back({"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight", {2, 8}});
  CHECK_THAT(f.refusal(named), says("no place for") && says("layers.1.self_attn.q_proj.lora_A"));

  std::filesystem::remove(f.folder() / "adapter_model.safetensors");
  CHECK_THAT(f.refusal(), says("adapter_model.safetensors"));
  CHECK_THROWS_AS(merge_adapter(f.base(), f.folder() / "absent"), Error);
  CHECK_THROWS_WITH(open_model(test::golden("tiny/llama-gqa3").string(), "absent", f.folder().path()),
                    says("got adapter 'absent'") && says("adapter_config.json"));
}

TEST_CASE("a broken adapter file is refused or read, never followed out of the file") {
  const Fixture f;
  const std::string good = adapter_file(tensors());
  CHECK(refused_mutations(good, 7, [&](const std::string& bytes) {
          f.write(config(), bytes);
          f.merged();
        }) > 10);
  CHECK(refused_mutations(config(), 3, [&](const std::string& text) {
          f.write(text, good);
          f.merged();
        }) > 10);
}
