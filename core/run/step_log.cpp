#include "run/step_log.hpp"

#include <numeric>

#include "store/codec_name.hpp"
#include "store/unused.hpp"

namespace kvlab {
namespace {

constexpr Tier tiers[] = {Tier::device, Tier::host};

std::string name_of(Stored as, const StoreOptions& o) {
  switch (as) {
    case Stored::first: return codec_name(o.codecs[0], o.shape.dtype);
    case Stored::second: return codec_name(o.codecs[1], o.shape.dtype);
    case Stored::host: return codec_name(o.host_codec, o.shape.dtype);
    case Stored::none: return "";
  }
  return "";
}

}  // namespace

StepLog::StepLog(const Engine& engine, bool parts, results::CellResult& out)
    : engine_(engine), out_(out), fired_(engine.fired()) {
  // The host gives a whole step to the GPU and then waits, so the host's clock cannot tell its parts.
  const bool told = parts || engine.store().stream().device() == Device::cpu;
  for (int p = 0; told && p < part_count; ++p) out_.parts.push_back(name_of(static_cast<Part>(p)));
  for (const Tier tier : tiers)
    for (const Stored as : all_stored)
      moved_[static_cast<std::size_t>(tier)][static_cast<std::size_t>(as)] = engine.store().ledger().moved(tier, as);
}

StepLog::Bytes StepLog::step(double ms, double device_ms, const PartSeconds& parts) {
  const std::int64_t step = static_cast<std::int64_t>(out_.step_ms.size());
  out_.step_ms.push_back(static_cast<float>(ms));
  if (engine_.store().stream().device() == Device::cuda) out_.step_device_ms.push_back(static_cast<float>(device_ms));
  if (!out_.parts.empty())
    for (double seconds : parts) out_.step_parts.push_back(static_cast<float>(seconds * 1000));
  const Ledger& ledger = engine_.store().ledger();
  const auto unused_of = unused_bytes(engine_.store());
  Bytes sum;
  for (const Tier tier : tiers) {
    for (const Stored as : all_stored) {
      const Ledger::Row& unused = unused_of[static_cast<std::size_t>(tier)][static_cast<std::size_t>(as)];
      Ledger::Row& before = moved_[static_cast<std::size_t>(tier)][static_cast<std::size_t>(as)];
      if (tier == Tier::device) sum.unused = std::accumulate(unused.begin(), unused.end(), sum.unused);
      for (std::size_t tag = 0; tag < tag_count; ++tag) {
        const std::int64_t held = ledger.held(tier, as)[tag], moved = ledger.moved(tier, as)[tag] - before[tag];
        if (held == 0 && moved == 0) continue;
        (tier == Tier::host ? sum.host : sum.device) += moved;
        before[tag] += moved;
        out_.ledger.push_back({step, tier == Tier::host ? "host" : "device", name_of(static_cast<Tag>(tag)), held,
                               moved, unused[tag], name_of(as, engine_.store().options())});
      }
    }
  }
  return sum;
}

void StepLog::decode(double ms, const PartSeconds& parts, const std::vector<std::int32_t>& slots) {
  const double device_ms = engine_.device_ms();
  const Bytes bytes = step(ms, device_ms, parts);
  moved_device_ += static_cast<double>(bytes.device);
  moved_host_ += static_cast<double>(bytes.host);
  ++decode_steps_;
  decode_ms_ += ms;
  device_ms_ += device_ms;
  decode_tokens_ += static_cast<std::int64_t>(slots.size());
  device_bytes_ += static_cast<double>(engine_.store().ledger().total(Tier::device));
  host_bytes_ += static_cast<double>(engine_.store().ledger().total(Tier::host));
  unused_bytes_ += static_cast<double>(bytes.unused);
  const Shape& s = engine_.store().shape();
  for (const int slot : slots)
    full_bytes_ += static_cast<double>(engine_.store().position(slot)) * s.layers * s.kv_heads * 2 * s.head_dim *
                   static_cast<double>(size_of(s.dtype));
}

void StepLog::finish(bool timed) {
  auto& s = out_.summary;
  s.device_bytes_peak = engine_.store().ledger().peak(Tier::device);
  s.host_bytes_peak = engine_.store().ledger().peak(Tier::host);
  s.disk_bytes_peak = 0;
  s.fired = engine_.fired() - fired_;
  if (decode_steps_ > 0) {
    s.device_bytes_decode = device_bytes_ / static_cast<double>(decode_steps_);
    s.host_bytes_decode = host_bytes_ / static_cast<double>(decode_steps_);
    s.disk_bytes_decode = 0;
    s.fragmentation = unused_bytes_ / static_cast<double>(decode_steps_);
    s.compression = full_bytes_ / device_bytes_;
    s.moved_device = moved_device_ / static_cast<double>(decode_steps_);
    s.moved_host = moved_host_ / static_cast<double>(decode_steps_);
  }
  if (timed && decode_steps_ > 0) s.overhead = 1 - device_ms_ / decode_ms_;
  if (timed) return;
  out_.step_ms.clear();
  out_.step_device_ms.clear();
  out_.step_parts.clear();
  out_.parts.clear();
}

double StepLog::tokens_per_s() const {
  return decode_ms_ > 0 ? static_cast<double>(decode_tokens_) / (decode_ms_ / 1000) : results::not_measured;
}

}  // namespace kvlab
