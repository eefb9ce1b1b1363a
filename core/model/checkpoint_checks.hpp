// Checks that every kind of checkpoint makes.
#pragma once
#include <string>
#include <string_view>

#include "model/checkpoint.hpp"

namespace kvlab {

// Checks that every tensor of the configuration is there with its shape, and no other one. Errc::model names the first
// wrong one.
void check_tensors(const Checkpoint& checkpoint, const std::string& where);

// Checks that no token id is outside the embedding. tokenizer may be null.
void check_tokenizer(const Tokenizer* tokenizer, const ModelConfig& config, const std::string& where);

void check_rows(std::string_view tensor, std::int64_t rows, std::int64_t row_begin, std::int64_t row_count,
                const std::string& where);

// Checks that rows [first_row, first_row + rows) of a tensor, which x holds, are finite in the dtype. NonFinite says
// how many numbers are not, and where the first one is.
void check_weights(const float* x, std::int64_t rows, std::int64_t columns, std::int64_t first_row, DType dtype,
                   const std::string& where);

[[noreturn]] void unknown_tensor(std::string_view name, const std::string& where);

}  // namespace kvlab
