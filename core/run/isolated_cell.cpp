#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <exception>
#include <new>

#include "base/memory_reserve.hpp"
#include "base/stop.hpp"
#include "base/threads.hpp"
#include "run/device.hpp"
#include "run/isolated.hpp"
#include "run/model_record.hpp"
#include "run/prepare.hpp"
#include "run/run_here.hpp"
#include "run/runner.hpp"

namespace kvlab {

int run_isolated_cell(const Experiment& given, const PluginCatalog& catalog, const std::string& id,
                      const RunOptions& options) {
  telling::begin();
  stop::watch();
  bool begun = false;  // the cell has begun: missing memory is then its result, as in a run without --isolate
  try {
    const Experiment e = with_backend(as_run_says(given, options.worker_of));
    use_threads(e.threads);
    want_reserve();
    start_threads();
    Prepared prepared = prepare(e, catalog, id);
    if (prepared.cells.empty())
      throw Error(Errc::data, "got other cells than the run that asks for it: the file or its data has changed", id);
    const std::string written_models = models_text(prepared.models);
    ModelInUse models(e, prepared);
    ReferenceCache references;
    CellInput in = input(e, catalog, prepared, prepared.cells.front());
    in.references = &references;
    in.progress = telling::progress;
    telling::begun();
    begun = true;
    const std::string out = e.output.string();
    const results::CellResult result = run_here(in, models, {results::parts_folder(out)}, options.strict);
    put_on_disk(out, result, run_info(e, options.command, written_models));
    telling::written();
    return result.summary.status == "ok" ? 0 : 1;
  } catch (const stop::Interrupted& stopped) {
    telling::cannot_go_on(fmt::format("the cell's process was stopped by {}", stop::name_of(stopped.signal)));
    return stop::exit_code(stopped.signal);
  } catch (const std::bad_alloc& no_memory) {
    if (begun)
      telling::no_memory(no_memory.what());
    else
      telling::cannot_go_on(fmt::format("got no memory to prepare the cell: {}", no_memory.what()));
  } catch (const std::exception& error) {
    telling::cannot_go_on(error.what());
  }
  return 1;
}

}  // namespace kvlab
