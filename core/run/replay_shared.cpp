#include "run/replay_shared.hpp"

#include <utility>

namespace kvlab {

void FullAttention::add(Layer layer) {
  if (!whole()) return;
  left_ -= static_cast<std::int64_t>(sizeof layer + (layer.output.size() + layer.mass.size()) * sizeof(float) +
                                     layer.sums.size() * sizeof(double) + layer.rank.size() * sizeof(std::int32_t));
  if (whole())
    layers_.push_back(std::move(layer));
  else
    layers_.clear();
}

std::shared_ptr<const FullAttention> ReplayShared::attention(const Key& of) const {
  const auto found = attention_.find(of);
  return found == attention_.end() ? nullptr : found->second;
}

void ReplayShared::keep(const Key& of, FullAttention attention) {
  if (!attention.whole() || attention.bytes() > left()) return;
  bytes_ += attention.bytes();
  attention_[of] = std::make_shared<const FullAttention>(std::move(attention));
}

std::shared_ptr<FullRuns> ReplayShared::full_runs(std::size_t task, std::int64_t seed, int page_size) {
  const std::tuple key{task, seed, page_size};
  std::int64_t bytes = 0;
  for (const auto& [of, runs] : full_runs_) bytes += runs->bytes();
  if (bytes > most_) std::erase_if(full_runs_, [&](const auto& of) { return of.first != key; });
  auto& runs = full_runs_[key];
  if (!runs) runs = std::make_shared<FullRuns>();
  return runs;
}

}  // namespace kvlab
