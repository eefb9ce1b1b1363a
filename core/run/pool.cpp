#include "run/pool.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>
#include <utility>

#include "base/log.hpp"
#include "base/stop.hpp"
#include "run/claims.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

// Tells of the cells whose parts have appeared, and leaves the others in `left`. One look at the folder is cheaper than
// one at each of many cells.
void look(PoolWork& work) {
  std::set<std::string> there;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(work.shared->folder(), ignored))
    if (entry.path().extension() == ".h5") there.insert(entry.path().stem().string());
  std::vector<const Cell*> rest;
  for (const Cell* cell : work.left) {
    if (there.count(cell->id) && work.shared->finished(cell->id))
      work.heard->finished(*cell);
    else
      rest.push_back(cell);
  }
  work.left = std::move(rest);
}

class Pool {
 public:
  Pool(const Spread& spread, std::vector<PoolWork>& all, Progress& progress)
      : spread_(spread), all_(all), progress_(progress) {}

  void run();

 private:
  std::unique_ptr<Workers> start();
  void watch(Workers& workers);
  void wait_for_others();

  void look_at_all() {
    for (PoolWork& work : all_) look(work);
  }
  std::size_t left() const {
    std::size_t cells = 0;
    for (const PoolWork& work : all_) cells += work.left.size();
    return cells;
  }
  std::size_t claims() const {
    std::size_t count = 0;
    for (const PoolWork& work : all_) count += claims_in(work.shared->folder()).size();
    return count;
  }
  bool any_claim_held() const {
    return std::any_of(all_.begin(), all_.end(), [](const PoolWork& w) { return any_held(w.shared->folder()); });
  }

  const Spread& spread_;
  std::vector<PoolWork>& all_;
  Progress& progress_;
  bool started_ = false;
};

std::unique_ptr<Workers> Pool::start() {
  std::vector<Pooled> pooled;
  for (const PoolWork& work : all_) pooled.push_back({work.experiment, work.cells_hash, work.shared->folder()});
  try {
    auto workers = start_workers(spread_, pooled, left());
    started_ = true;
    return workers;
  } catch (const CannotStart& refused) {
    if (!started_) throw;
    throw Error(refused.code(), refused.message(), refused.where());  // something was run
  }
}

// Looks until all workers have ended.
void Pool::watch(Workers& workers) {
  int handed_on = 0;
  for (int times = 0; workers.any(); ++times) {
    if (times % 5 == 0) {
      look_at_all();
      if (left() == 0) workers.no_cells_left();
      progress_.waiting(claims(), workers.name());
    }
    if (const int signal = stop::requested(); signal && !handed_on) workers.stop(handed_on = signal);
    usleep(100'000);
  }
  look_at_all();
}

void Pool::wait_for_others() {
  for (; left() && !stop::requested() && any_claim_held(); usleep(200'000)) {
    look_at_all();
    progress_.waiting(claims(), "other workers");
  }
  look_at_all();
}

void Pool::run() {
  if (left() == 0) return;
  for (const PoolWork& work : all_) work.shared->tell_workers();
  std::set<std::string> places;  // with messages
  // A cell whose worker ended is tried again. Its claim counts that, and so does this: a worker may end before its
  // cell.
  for (int without_end = 0; without_end < 3 && left();) {
    const std::size_t before = left();
    const bool others = any_claim_held();  // workers of another run, which may leave cells behind
    const auto workers = start();
    if (!spread_.wait) {
      log::info(
          fmt::format("not waiting for {}. `kvlab report` shows the finished cells. The same command without "
                      "--no-wait waits for the others and makes the result file",
                      workers->name()));
      return;
    }
    watch(*workers);
    if (!workers->messages().empty()) places.insert(workers->messages());
    const bool left_behind = others || claims() > 0;
    wait_for_others();
    if (stop::requested() || !left_behind) break;
    without_end = left() < before ? 0 : without_end + 1;
  }
  if (left() == 0 || stop::requested()) return;
  for (const std::string& place : places) log::error("messages of the workers: " + place);
}

}  // namespace

void run_by_workers(const Spread& spread, std::vector<PoolWork>& all, Progress& progress) {
  Pool(spread, all, progress).run();
}

}  // namespace kvlab
