#include "run/cell.hpp"

#include <exception>
#include <new>

#include "run/fidelity.hpp"
#include "run/plain_pass.hpp"
#include "run/summary.hpp"

namespace kvlab {

using results::CellResult;

void check_cell(const CellInput& in) { make_engine(in, 1); }

CellResult run_cell(const CellInput& in) {
  CellResult out;
  describe_cell(in, out);
  try {
    const auto answers = PlainPass(in, out).run();  // its engine is gone before the next pass takes memory
    if (in.wants(Metric::fidelity)) measure_fidelity(in, answers.outputs, out);
    summarize(in, answers.forced, out);
    return out;
  } catch (const OutOfMemory& e) {
    out.summary.status = "oom";
    out.summary.error = e.what;
  } catch (const std::bad_alloc&) {
    out.summary.status = "oom";
    out.summary.error = "the operating system refused memory";
  } catch (const std::exception& e) {
    out.summary.status = "failed";
    out.summary.error = e.what();
  }
  // Half of a cell is no result: what was measured before it broke is not kept.
  CellResult broken;
  describe_cell(in, broken);
  broken.summary.status = out.summary.status;
  broken.summary.error = out.summary.error;
  return broken;
}

}  // namespace kvlab
