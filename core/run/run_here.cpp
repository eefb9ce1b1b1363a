#include "run/run_here.hpp"

#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "base/log.hpp"
#include "base/memory_reserve.hpp"
#include "model/bundled.hpp"
#include "run/cannot_go_on.hpp"
#include "run/cell.hpp"
#include "run/claims.hpp"
#include "run/device.hpp"
#include "run/disturbance.hpp"

namespace kvlab {

using results::CellResult;

namespace {

CellResult run_alone(const CellInput& in, ModelInUse& models) {
  try {
    models.need(in.cell->model);
  } catch (const NoRoom& no_room) {
    return broken_cell(in, "oom", no_room.what());
  } catch (const NonFinite& weights) {
    return broken_cell(in, weights);
  }
  CellInput with_weights = in;
  with_weights.model = models.model(in.cell->model);
  return run_cell(with_weights);
}

// Whether another cell may make this one's times longer: on a CPU cells share caches and memory.
bool may_be_lengthened(const CellInput& in) { return in.experiment->backend == "cpu" && in.wants(Metric::latency); }

}  // namespace

void ModelInUse::need(std::size_t model) {
  if (no_room_.count(model)) throw NoRoom(no_room_.at(model));
  if (nonfinite_.count(model)) throw nonfinite_.at(model);
  if (!e_.recording.empty() || (outline_ && model_ == model)) return;
  if (outline_) prepared_.models[model_] = std::exchange(outline_, nullptr);
  const ModelSpec& spec = e_.models[model];
  const log::Timed timed("weights of " + spec.name());
  auto checkpoint = std::move(prepared_.checkpoints[model]);
  try {
    if (!checkpoint) checkpoint = open_model(spec.path, spec.adapter, e_.folder);
    outline_ = std::exchange(prepared_.models[model], load_model(*checkpoint, spec.dtype, spec.name(), device_of(e_)));
  } catch (const std::bad_alloc& e) {
    throw NoRoom(no_room_[model] = std::string("weights of ") + spec.name() + ": " + e.what());
  } catch (const NonFinite& e) {
    nonfinite_.emplace(model, e);
    throw;
  }
  model_ = model;
}

CellResult run_here(const CellInput& in, ModelInUse& models, const std::vector<std::string>& folders, bool strict) {
  std::optional<Neighbours> neighbours;
  if (may_be_lengthened(in)) neighbours.emplace(folders, in.cell->id);
  const auto run = [&] { return run_alone(in, models); };
  CellResult result = strict ? run_until_quiet(run) : run();
  results::SummaryRow& row = result.summary;
  const bool timed = row.status == "ok" && row.threads > 0;  // an oracle is not
  if (timed && !results::has_label(row, "disturbed") && neighbours && neighbours->any())
    results::add_label(row, "disturbed");
  return result;
}

void put_on_disk(const std::string& out, const results::CellResult& result, const results::RunInfo& info) {
  const std::string part =
      on_own_file("its part could not be written", [&] { return results::write_part(out, result, info); });
  log::debug("cell " + result.id + ": written to " + part);
}

void want_reserve() {
  if (!keep_reserve()) throw NoRoom("got none for what ends a run in order, wanted 16 MiB");
}

}  // namespace kvlab
