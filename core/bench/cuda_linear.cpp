#include <fmt/format.h>

#include "bench/cuda_timing.hpp"
#include "model/random_weights.hpp"
#include "ops/linear/linear.hpp"

namespace kvlab::bench {
namespace {

struct Kind {
  const char* name;
  std::int64_t n, k;
  bool gated = false;
  double bytes() const { return 2. * static_cast<double>(n) * static_cast<double>(k); }
};
constexpr Kind qkv = {"qkv", 6144, 4096}, output = {"o", 4096, 4096}, gate_up = {"gate, up", 28672, 4096, true},
               down = {"down", 4096, 14336}, head = {"lm_head", 128256, 4096};
constexpr Kind small[] = {{"qkv", 960, 576},     {"o", 576, 576},         {"gate, up", 3072, 576, true},
                          {"down", 576, 1536},   {"lm_head", 49152, 576}, {"gate, up", 1536, 256, true},
                          {"lm_head", 4096, 256}};
constexpr std::int64_t most_rows = 40;

// Room for the weights of any case, and activations that all cases share.
class Memory {
 public:
  explicit Memory(const CudaTimer& timer)
      : weights_(bytes),
        x_(most_rows * widest * 4),
        y_(most_rows * head.n * 4),
        residual_(most_rows * output.n * 4),
        gated_(most_rows * widest * 4) {
    const std::vector<float> values = randoms(std::int64_t{1} << 22);
    std::vector<bf16> block;
    for (const float v : values) block.emplace_back(v / 16);
    const CudaRuntime& r = cuda_backend()->runtime;
    for (std::size_t at = 0; at < bytes; at += block.size() * 2)
      r.copy(weights_.as<std::byte>() + at, block.data(), std::min(bytes - at, block.size() * 2), timer.handle());
    for (std::size_t at = 0; at < most_rows * widest * 4; at += block.size() * 2)
      r.copy(x_.as<std::byte>() + at, block.data(),
             std::min<std::size_t>(most_rows * widest * 4 - at, block.size() * 2), timer.handle());
    norm_ = timer.put(std::vector<float>(widest, 1.f));
    squares_ = timer.put(std::vector<float>(most_rows * widest / ops::norm_piece, 1.f));
    r.fill(y_.as<void>(), 0, most_rows * head.n * 4, timer.handle());
    r.fill(residual_.as<void>(), 0, most_rows * output.n * 4, timer.handle());
    r.synchronize(timer.handle());
  }

  // A layer on m rows whose weights begin at `offset` bytes. All layers share x and the outputs.
  ops::LinearArgs layer(const Kind& kind, std::int64_t m, std::size_t offset) const {
    ops::LinearArgs a;
    a.weight = weights_.as<std::byte>() + offset;
    a.n = kind.n, a.k = kind.k, a.m = m;
    a.x = x_.as<void>(), a.x_dtype = DType::bf16, a.x_stride = kind.k;
    if (kind.gated)
      a.gated = gated_.as<void>(), a.gated_stride = kind.n / 2;
    else
      a.y = y_.as<float>(), a.y_stride = kind.n;
    return a;
  }
  float* residual() const { return residual_.as<float>(); }
  const float* norm() const { return norm_->as<float>(); }
  void* input() const { return x_.as<void>(); }
  float* squares() const { return squares_->as<float>(); }
  const void* gated() const { return gated_.as<void>(); }

  static constexpr std::size_t bytes = std::size_t{1100} << 20;

 private:
  static constexpr std::size_t widest = 14336;
  DeviceBuffer weights_, x_, y_, residual_, gated_;
  std::unique_ptr<DeviceBuffer> norm_, squares_;
};

// Multiplies by one copy of the weights after the other, as the layers of a step follow each other. The copies make
// half a gigabyte, but are at most 64. The line has the time of one product.
Line measure(const CudaTimer& timer, const Memory& memory, const Kind& kind, std::int64_t m, bool blas) {
  const int copies = static_cast<int>(std::clamp(512e6 / kind.bytes(), 1., 64.));
  const Times t = timer.time([&] {
    for (int c = 0; c < copies; ++c)
      (blas ? ops::linear_blas : ops::linear_stream)(
          memory.layer(kind, m, static_cast<std::size_t>(c) * static_cast<std::size_t>(kind.n * kind.k * 2)),
          timer.stream());
  });
  Line l{"gemv", fmt::format("{} m={} n={} k={}, one of {}", kind.name, m, kind.n, kind.k, copies),
         blas ? "cublaslt" : "mma, bulk copies", t.median / copies, t.best / copies};
  l.bytes = kind.bytes();
  l.flops = static_cast<double>(m) * kind.bytes();
  l.reads = true;
  return l;
}

// Measures a layer of a decode step without attention: four products. Two of them leave a norm that the next one takes.
Line measure_layer(const CudaTimer& timer, const Memory& memory, std::int64_t m) {
  constexpr int layers = 2;
  const Times t = timer.time([&] {
    std::size_t at = 0;
    const auto next = [&](const Kind& kind) {
      const ops::LinearArgs a = memory.layer(kind, m, at);
      at += static_cast<std::size_t>(kind.n * kind.k * 2);
      return a;
    };
    const auto takes = [&](ops::LinearArgs a) {
      a.taken.squares = memory.squares(), a.taken.eps = 1e-5f;
      ops::linear(a, timer.stream());
    };
    const auto leaves = [&](ops::LinearArgs a) {
      a.y = memory.residual(), a.add = true;
      a.left.weight = memory.norm(), a.left.out = memory.input(), a.left.out_stride = a.n;
      a.left.squares = memory.squares();
      ops::linear(a, timer.stream());
    };
    for (int i = 0; i < layers; ++i) {
      takes(next(qkv));
      ops::LinearArgs attended = next(output);
      attended.x = memory.gated();
      leaves(attended);
      takes(next(gate_up));
      ops::LinearArgs last = next(down);
      last.x = memory.gated();
      leaves(last);
    }
  });
  Line l{"gemv", fmt::format("a layer without attention, m={}, one of {}", m, layers), "mma, bulk copies",
         t.median / layers, t.best / layers};
  l.bytes = qkv.bytes() + output.bytes() + gate_up.bytes() + down.bytes();
  l.flops = static_cast<double>(m) * l.bytes;
  l.reads = true;
  return l;
}

}  // namespace

GemmRate cuda_gemm_rate() {
  constexpr std::int64_t n = 8192;
  const CudaTimer timer;
  const DeviceBuffer w(n * n * 2), x(n * n * 2), y(n * n * 4);
  random_weights(w.as<void>(), DType::bf16, 0, n * n, 1, 0.01f, timer.stream());
  random_weights(x.as<void>(), DType::bf16, 0, n * n, 2, 1, timer.stream());
  ops::LinearArgs a;
  a.weight = w.as<void>(), a.n = a.k = a.m = n;
  a.x = x.as<void>(), a.x_dtype = DType::bf16, a.x_stride = n;
  a.y = y.as<float>(), a.y_stride = n;
  const Times t = timer.time([&] { ops::linear_blas(a, timer.stream()); }, 10);
  return {2. * n * n * n / t.best, "cublaslt"};
}

std::vector<Line> cuda_gemv_cases() {
  std::vector<Line> lines;
  const CudaTimer timer;
  const Memory memory(timer);
  for (const Kind& kind : {qkv, output, gate_up, down, head})
    for (const std::int64_t m : {1, 8, 16}) lines.push_back(measure(timer, memory, kind, m, false));
  for (const std::int64_t m : {1, 8, 16}) lines.push_back(measure_layer(timer, memory, m));
  for (const Kind& kind : {output, gate_up, down})
    for (const std::int64_t m : {std::int64_t{8}, std::int64_t{32}, most_rows})
      for (const bool blas : {false, true})
        if (blas || m > 8) lines.push_back(measure(timer, memory, kind, m, blas));
  for (const Kind& kind : small) lines.push_back(measure(timer, memory, kind, 1, false));
  return lines;
}

}  // namespace kvlab::bench
