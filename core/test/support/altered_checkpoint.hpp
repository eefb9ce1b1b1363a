// A checkpoint that alters some tensors as it reads them, like the file of a broken or retrained model.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "model/checkpoint.hpp"

namespace kvlab::test {

class AlteredCheckpoint final : public Checkpoint {
 public:
  // The new value of the element at [row, column]; `value` is the file's. 1-D tensors have one row.
  using Alter = std::function<float(std::int64_t row, std::int64_t column, float value)>;

  explicit AlteredCheckpoint(std::unique_ptr<Checkpoint> base) : base_(std::move(base)) {
    config_ = base_->config();
    tokenizer_ = base_->tokenizer();
    fingerprint_ = "altered " + base_->fingerprint();
  }
  void alter(const std::string& tensor, Alter alter) { alters_[tensor] = std::move(alter); }

  bool has(std::string_view name) const override { return base_->has(name); }
  std::vector<std::int64_t> shape(std::string_view name) const override { return base_->shape(name); }
  std::vector<std::string> names() const override { return base_->names(); }
  std::string stored_type(std::string_view name) const override { return base_->stored_type(name); }
  void read_rows(std::string_view name, std::int64_t row_begin, std::int64_t row_count, float* out) const override {
    base_->read_rows(name, row_begin, row_count, out);
    const auto it = alters_.find(name);
    if (it == alters_.end()) return;
    const std::int64_t columns = shape(name).back();
    for (std::int64_t i = 0; i < row_count * columns; ++i)
      out[i] = it->second(row_begin + i / columns, i % columns, out[i]);
  }

 private:
  std::unique_ptr<Checkpoint> base_;
  std::map<std::string, Alter, std::less<>> alters_;
};

}  // namespace kvlab::test
