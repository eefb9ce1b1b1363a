// What the cells of a replay share. The full cache's part of a recorded question is the same for every policy, so the
// first cell leaves it for the others.
#pragma once
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "run/full_runs.hpp"

namespace kvlab {

// What attention to all tokens leaves of one question's compared steps. Every array is of one layer of one step.
class FullAttention {
 public:
  struct Layer {
    std::vector<float> output;       // [query head, head_dim]
    std::vector<float> mass;         // [query head, text position]
    std::vector<double> sums;        // [kv_head, page] of the mass, over the query heads of a KV head
    std::vector<std::int32_t> rank;  // [kv_head, page] how many pages have more mass, or as much and come before it
  };
  // It takes no more layers than fit most_bytes.
  explicit FullAttention(std::int64_t most_bytes) : left_(most_bytes), most_(most_bytes) {}
  void add(Layer layer);
  const Layer& at(std::size_t i) const { return layers_.at(i); }  // in the order of add()
  bool whole() const { return left_ >= 0; }                       // whether it took all of them
  std::int64_t bytes() const { return most_ - left_; }

 private:
  std::vector<Layer> layers_;
  std::int64_t left_, most_;
};

class ReplayShared {
 public:
  explicit ReplayShared(std::int64_t most_bytes = std::int64_t{1} << 30) : most_(most_bytes) {}

  // Of a case of the recording. by_rank: its keys were turned back and forth, which rounds them.
  struct Key {
    std::size_t number = 0;
    int page_size = 0;
    bool by_rank = false;
    auto operator<=>(const Key&) const = default;
  };
  // Null where no cell has left it, or where it did not fit.
  std::shared_ptr<const FullAttention> attention(const Key& of) const;
  std::int64_t left() const { return most_ - bytes_; }  // bytes for attention to come
  void keep(const Key& of, FullAttention attention);

  // One for each task, seed and page size. The others go where all take more than most_bytes.
  std::shared_ptr<FullRuns> full_runs(std::size_t task, std::int64_t seed, int page_size);

 private:
  std::int64_t most_, bytes_ = 0;
  std::map<Key, std::shared_ptr<const FullAttention>> attention_;
  std::map<std::tuple<std::size_t, std::int64_t, int>, std::shared_ptr<FullRuns>> full_runs_;
};

}  // namespace kvlab
