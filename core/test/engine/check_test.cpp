// Engine::check reports what an engine would refuse. It needs no weights, no memory and, for CUDA, no GPU.
#include <catch2/catch.hpp>

#include "engine/engine.hpp"
#include "model/synthetic.hpp"

using namespace kvlab;

namespace {

struct Asking final : Policy {
  Needs wanted;
  CodecSpec below;
  int attached = 0;
  Needs needs() const override { return wanted; }
  CodecSpec host_codec() const override { return below; }
  void attach(const Shape& shape, const BudgetAmount&, Workspace& w) override {
    attached += w.state("test", 4, shape.max_slots) != nullptr;
  }
};

std::string refusal(Policy& policy, Device device, DType dtype = DType::bf16, void (*change)(Model&) = nullptr,
                    int chunk = 0, int max_tokens = 64, const BudgetAmount& budget = {}) {
  Model model;
  model.config = open_synthetic("tiny")->config();
  model.dtype = dtype;
  model.name = "tiny";
  if (change) change(model);
  EngineOptions o;
  o.device = device;
  o.max_tokens = max_tokens;
  o.prefill_chunk = chunk;
  o.budget = budget;
  try {
    Engine::check(model, policy, o);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("Engine::check passes what runs and attaches the policy") {
  for (const Device device : {Device::cpu, Device::cuda}) {
    Asking policy;
    CHECK(refusal(policy, device) == "");
    CHECK(policy.attached == 1);
  }
  Asking policy;
  CHECK(refusal(policy, Device::cuda, DType::f16) == "");
}

TEST_CASE("Engine::check names what cannot run") {
  Asking policy;
  CHECK_THAT(refusal(policy, Device::cuda, DType::f32), Catch::Contains("got dtype f32, wanted bf16 or f16"));
  const auto head_dim = [](Model& m) { m.config.head_dim = 20; };
  for (const Device device : {Device::cpu, Device::cuda})
    CHECK_THAT(refusal(policy, device, DType::bf16, head_dim), Catch::Contains("got head_dim 20"));
  const auto width = [](Model& m) { m.config.hidden = 68; };
  CHECK_THAT(refusal(policy, Device::cuda, DType::bf16, width), Catch::Contains("got hidden size 68"));
  CHECK_THAT(refusal(policy, Device::cpu, DType::bf16, nullptr, 0, 5000), Catch::Contains("wanted at most 4096"));

  Asking other;
  other.below = {{8}, {8}};
  CHECK(refusal(other, Device::cpu) == "");
  CHECK(refusal(other, Device::cuda) == "");
  Asking turned;
  turned.wanted.rope(RopeRegime::re_rotate);
  CHECK(refusal(turned, Device::cpu) == "");
  CHECK(refusal(turned, Device::cuda) == "");
  Asking whole;
  whole.wanted.chunked_prompts(false);
  CHECK_THAT(refusal(whole, Device::cuda, DType::bf16, nullptr, 16), Catch::Contains("got prefill_chunk 16"));
}

TEST_CASE("Engine::check refuses a device or a dtype that the policy does not run with") {
  Asking cpu;
  cpu.wanted.devices({Device::cpu});
  CHECK(refusal(cpu, Device::cpu) == "");
  CHECK_THAT(refusal(cpu, Device::cuda), Catch::Contains("got backend cuda, wanted cpu"));
  Asking narrow;
  narrow.wanted.dtypes({DType::f32, DType::f16});
  CHECK(refusal(narrow, Device::cpu, DType::f32) == "");
  CHECK_THAT(refusal(narrow, Device::cpu, DType::bf16), Catch::Contains("got dtype bf16, wanted f32 or f16"));
}

TEST_CASE("Engine::check refuses a budget for a policy that decides by itself how much it keeps") {
  const BudgetAmount tokens{BudgetAmount::tokens, 48};
  Asking limited, own;
  own.wanted.own_amount(true);
  CHECK(refusal(limited, Device::cpu, DType::bf16, nullptr, 0, 64, tokens) == "");
  CHECK(refusal(own, Device::cpu) == "");
  CHECK_THAT(refusal(own, Device::cpu, DType::bf16, nullptr, 0, 64, tokens), Catch::Contains("got a budget"));
}
