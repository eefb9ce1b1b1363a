// The environment of a task: the model's tokenizer and chat template, files, the seed.
#pragma once
#include <kvlab/task.hpp>

#include <filesystem>
#include <memory>

#include "model/tokenizer.hpp"

namespace kvlab {

class ModelTaskEnv final : public TaskEnv {
 public:
  ModelTaskEnv(std::shared_ptr<const Tokenizer> tokenizer, std::filesystem::path folder, std::uint64_t seed,
               int questions, int turns = 1);

  std::vector<int> encode(std::string_view text) const override;
  std::vector<int> encode_next(std::string_view text) const override;
  std::string decode(const std::vector<int>& tokens) const override;
  std::vector<int> text_open() const override;
  std::vector<int> bos() const override;
  std::vector<int> chat_open() const override { return open_; }
  std::vector<int> chat_close() const override { return close_; }
  std::vector<int> chat_next() const override { return next_; }
  std::string read_text(const std::string& path) const override;
  std::vector<Record> records(const std::string& path) const override;
  std::uint64_t seed() const override { return seed_; }
  int questions() const override { return questions_ * turns_; }
  int turns() const override { return turns_; }

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::filesystem::path folder_;
  std::uint64_t seed_;
  int questions_, turns_;
  std::vector<int> open_, close_, next_;
};

}  // namespace kvlab
