// Heads that keep attention sinks and the newest tokens, beside retrieval heads that keep all.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kvlab/edits.hpp"
#include "kvlab/policy.hpp"
#include "kvlab/statistics.hpp"
#include "kvlab/tier_demand.hpp"
#include "kvlab/workspace.hpp"

namespace kvlab {

class StreamingHeads {
 public:
  static constexpr std::int32_t everything = std::numeric_limits<std::int32_t>::max();

  StreamingHeads() = default;
  // For attach. retrieval: [layer, kv_head]. The others keep the first and last tokens that `pins` counts.
  StreamingHeads(const Shape& shape, const std::vector<bool>& retrieval, Pins pins, Workspace& w) {
    std::vector<std::int32_t> keep;
    for (const bool all : retrieval) keep.push_back(all ? everything : pinned(pins));
    streaming_ = pinned(pins);
    tiers_ = TierDemand(shape, {}, share(retrieval));
    keep_ = HeadConstants<std::int32_t>("tokens to keep", shape, keep, w);
    const std::vector<Pins> rows(static_cast<std::size_t>(shape.max_slots), pins);
    pins_ = static_cast<const Pins*>(w.constant("pins", rows.data(), rows.size() * sizeof(Pins)));
  }

  // For Policy::prompt_masks: streaming heads see the first and newest tokens that `pins` counts, retrieval heads all.
  static std::vector<PromptMask> prompt_masks(const std::vector<bool>& retrieval, Pins pins) {
    std::vector<PromptMask> masks;
    for (const bool all : retrieval) masks.push_back(all ? PromptMask{} : PromptMask{pins.first, pins.last});
    return masks;
  }

  // What a layer's streaming heads hold beyond that, for Edits::evict_surplus.
  Surplus surplus(const LayerKv& kv) const {
    Surplus surplus;
    surplus.keep = {keep_.of(kv), {kv.rows(), kv.kv_heads()}, {0, 1}};
    surplus.pins = pins_;
    return surplus;
  }

  // Policy::demand. A step appends its token before a head's oldest one leaves.
  Demand demand(int prompt, int max_new) const {
    return tiers_.of_device(prompt, max_new, [this](int, bool decodes) { return std::int64_t{streaming_} + decodes; });
  }

  // The share of these heads that are marked.
  static double share(const std::vector<bool>& heads) {
    if (heads.empty()) return 0;
    return static_cast<double>(std::count(heads.begin(), heads.end(), true)) / static_cast<double>(heads.size());
  }

 private:
  static std::int32_t pinned(Pins pins) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(std::int64_t{pins.first} + pins.last, everything));
  }

  TierDemand tiers_;
  std::int32_t streaming_ = 0;  // tokens that a streaming head keeps
  HeadConstants<std::int32_t> keep_;
  const Pins* pins_ = nullptr;
};

}  // namespace kvlab
