// Small row operations of the executor, f32.
#pragma once
#include <cstdint>

namespace kvlab::ops {

void rms_norm(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t n, float* out);
void silu_mul(const float* gate, const float* up, std::int64_t count, float* out);  // out = silu(gate) * up
void add(const float* x, std::int64_t count, float* inout);
void round_to(float* x, std::int64_t count, int dtype_bytes);  // 2: through bf16; 4: as it is

}  // namespace kvlab::ops
