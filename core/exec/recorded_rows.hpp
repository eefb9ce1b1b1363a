// Rows of a recorded sequence. They take the place of those that a model computes.
#pragma once
#include <cstdint>
#include <span>

namespace kvlab {

class RecordedRows {
 public:
  virtual ~RecordedRows() = default;
  // Copies the rows of text positions [first, first + n) of a layer: queries [n, query head, head_dim], keys and values
  // [n, KV head, head_dim]. Queries and keys are rotated by text position. Throws Errc::internal for rows that the
  // recording lacks.
  virtual void read(int layer, std::int64_t first, std::int64_t n, float* queries, float* keys,
                    float* values) const = 0;
  // The same rows of the prompt's tokens, where they lie. Valid until another sequence is recorded here.
  struct Prompt {
    const float *queries, *keys, *values;
    const std::uint16_t *key_bits, *value_bits;  // the same in bf16 [KV head, token, head_dim]; null of f32
    std::int64_t tokens;
  };
  virtual Prompt prompt(int layer) const = 0;
  // [query head, prompt token] attention mass of the prompt, summed over its queries.
  virtual std::span<const float> prompt_mass(int layer) const = 0;
};

}  // namespace kvlab
