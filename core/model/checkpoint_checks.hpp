// What every kind of checkpoint checks.
#pragma once
#include <string>
#include <string_view>

#include "model/checkpoint.hpp"

namespace kvlab {

// Every tensor that the configuration calls for is there with its shape, and no other one. Errc::model names the first
// that is wrong.
void check_tensors(const Checkpoint& checkpoint, const std::string& where);

// No token id is outside the embedding. tokenizer may be null.
void check_tokenizer(const Tokenizer* tokenizer, const ModelConfig& config, const std::string& where);

void check_rows(std::string_view tensor, std::int64_t rows, std::int64_t row_begin, std::int64_t row_count,
                const std::string& where);

// Rows [first_row, first_row + rows) of a tensor are finite in the dtype. NonFinite says how many are not, and where.
void check_weights(const float* x, std::int64_t rows, std::int64_t columns, std::int64_t first_row, DType dtype,
                   const std::string& where);

[[noreturn]] void unknown_tensor(std::string_view name, const std::string& where);

}  // namespace kvlab
