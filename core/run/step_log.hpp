// Logs every engine step of a cell's plain pass: its time and parts, the ledger's rows, and the sums for the memory
// columns.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "base/part_timer.hpp"
#include "engine/engine.hpp"
#include "result/results.hpp"

namespace kvlab {

class StepLog {
 public:
  // Counts the engine's work from now on. parts: whether steps on a GPU have parts too.
  StepLog(const Engine& engine, bool parts, results::CellResult& out);

  void prompt(double ms, const PartSeconds& parts) { step(ms, results::not_measured, parts); }
  void decode(double ms, const PartSeconds& parts, const std::vector<std::int32_t>& slots);

  // Fills the summary's memory columns and `fired`. Without `timed` it drops the times.
  void finish(bool timed);

  // Tokens per second of decode steps; NaN before the first step.
  double tokens_per_s() const;

 private:
  struct Bytes {
    std::int64_t device = 0, host = 0;  // that arrived in a step
    std::int64_t unused = 0;            // of the device's, behind it
  };
  Bytes step(double ms, double device_ms, const PartSeconds& parts);

  const Engine& engine_;
  results::CellResult& out_;
  // Bytes moved before the latest step, by tier, codec and tag.
  std::array<Ledger::Rows, 2> moved_{};
  std::int64_t fired_ = 0, decode_steps_ = 0, decode_tokens_ = 0;
  // Sums over decode steps.
  double decode_ms_ = 0, device_ms_ = 0, device_bytes_ = 0, host_bytes_ = 0, unused_bytes_ = 0, full_bytes_ = 0;
  double moved_device_ = 0, moved_host_ = 0;
};

}  // namespace kvlab
