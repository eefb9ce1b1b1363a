// What every engine step of a cell's plain pass took and held: times, their parts, the ledger's rows, and the means
// that the memory columns need.
#pragma once
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/part_timer.hpp"
#include "engine/engine.hpp"
#include "result/results.hpp"

namespace kvlab {

class StepLog {
 public:
  // Counts what the engine does from now on. parts: are there those of a step on a GPU too?
  StepLog(const Engine& engine, bool parts, results::CellResult& out);

  void prompt(double ms, const PartSeconds& parts) { step(ms, results::not_measured, parts); }
  void decode(double ms, const PartSeconds& parts, const std::vector<std::int32_t>& slots);

  // The summary's memory columns and `fired`; without `timed` the times go.
  void finish(bool timed);

  // Tokens that decode steps yielded per second of theirs; NaN before the first.
  double tokens_per_s() const;

 private:
  void step(double ms, double device_ms, const PartSeconds& parts);

  const Engine& engine_;
  results::CellResult& out_;
  std::map<std::pair<int, int>, std::int64_t> moved_;  // (tier, tag) -> bytes before the latest step
  std::int64_t fired_ = 0, decode_steps_ = 0, decode_tokens_ = 0;
  double decode_ms_ = 0, device_ms_ = 0, device_bytes_ = 0, full_bytes_ = 0;  // sums over decode steps
};

}  // namespace kvlab
