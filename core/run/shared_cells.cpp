#include "run/shared_cells.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/log.hpp"
#include "base/new_file.hpp"
#include "base/stop.hpp"
#include "result/results.hpp"
#include "run/gpus.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

// A part that is replaced gets another inode while the old one is still there. "" = no file.
std::string stamp(const std::string& path) {
  struct stat file {};
  if (::stat(path.c_str(), &file) != 0) return "";
  return fmt::format("{} {}.{:09}", file.st_ino, file.st_mtim.tv_sec, file.st_mtim.tv_nsec);
}

std::string old_parts_file(const std::string& folder) { return folder + "/old_parts"; }

// Tells of the cells whose parts have appeared, and leaves the others in `left`. One look at the folder is cheaper than
// one at each of many cells.
void look(const SharedCells& shared, std::vector<const Cell*>& left, WorkersHeard& heard) {
  std::set<std::string> there;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(shared.folder(), ignored))
    if (entry.path().extension() == ".h5") there.insert(entry.path().stem().string());
  std::vector<const Cell*> rest;
  for (const Cell* cell : left) {
    if (there.count(cell->id) && shared.finished(cell->id))
      heard.finished(*cell);
    else
      rest.push_back(cell);
  }
  left = std::move(rest);
}

// Looks until all workers have ended.
void watch(Workers& workers, const SharedCells& shared, std::vector<const Cell*>& left, WorkersHeard& heard) {
  int handed_on = 0;
  for (int times = 0; workers.any(); ++times) {
    if (times % 5 == 0) {
      look(shared, left, heard);
      if (left.empty()) workers.no_cells_left();
      heard.waiting(claims_in(shared.folder()).size(), workers.name());
    }
    if (const int signal = stop::requested(); signal && !handed_on) workers.stop(handed_on = signal);
    usleep(100'000);
  }
  look(shared, left, heard);
}

}  // namespace

SharedCells::SharedCells(std::string out, bool strict, const std::vector<std::string>& ids)
    : out_(std::move(out)), folder_(results::parts_folder(out_)), strict_(strict) {
  for (const std::string& id : ids)
    if (const std::string now = stamp(part(id)); !now.empty()) first_[id] = now;
}

std::string SharedCells::part(const std::string& id) const { return results::part_path(out_, id); }

bool SharedCells::finished(const std::string& id) const {
  const std::string now = stamp(part(id));
  if (now.empty()) return false;
  const auto old = old_.find(id);
  return old == old_.end() || old->second != now;
}

std::optional<Claim> SharedCells::claim(const std::string& id) const {
  try {
    return Claim::take(folder_, id);
  } catch (const NoLocks& error) {
    if (strict_) throw;
    log::debug(fmt::format("cell {} has no claim: {}", id, error.what()));
    return Claim::none();
  } catch (const Error& error) {
    if (strict_) throw;
    log::warn(fmt::format("cell {} has no claim, so workers beside this run may run it, too: {}", id, error.what()));
    return Claim::none();
  }
}

void SharedCells::replaces(const std::string& id, bool known) {
  const auto first = first_.find(id);
  const std::string old = known ? stamp(part(id)) : first == first_.end() ? "" : first->second;
  if (!old.empty()) old_[id] = old;
}

void SharedCells::tell_workers() const {
  std::string text;
  for (const auto& [id, when] : old_) text += id + " " + when + "\n";
  write_text(old_parts_file(folder_), text);
}

void SharedCells::tidy() const {
  std::error_code ignored;
  for (const char* name : {"old_parts", "mpi.sh", "slurm.sh", "slurm.job"}) fs::remove(folder_ + "/" + name, ignored);
  remove_abandoned(folder_);
  forget_ended(gpus_folder(folder_));
  fs::remove(gpus_folder(folder_), ignored);  // these two only where they are empty
  fs::remove(folder_, ignored);
}

void SharedCells::ask_run() {
  std::ifstream in(old_parts_file(folder_));
  std::string id, inode, time;
  while (in >> id >> inode >> time) old_[id] = inode + " " + time;
}

std::vector<const Cell*> run_by_workers(const Spread& spread, const Experiment& e, const std::string& cells_hash,
                                        std::vector<const Cell*> left, const SharedCells& shared, WorkersHeard& heard) {
  if (left.empty()) return left;
  shared.tell_workers();
  std::set<std::string> places;  // with messages
  // A cell whose worker ended is tried again. Its claim counts that, and so does this: a worker may end before its
  // cell.
  for (int without_end = 0; without_end < 3 && !left.empty();) {
    const std::size_t before = left.size();
    const bool others = any_held(shared.folder());  // workers of another run, which may leave cells behind
    const auto workers = start_workers(spread, e, cells_hash, left.size(), shared.folder());
    if (!spread.wait) {
      log::info(
          fmt::format("not waiting for {}. `kvlab report` shows the finished cells. The same command without "
                      "--no-wait waits for the others and makes the result file",
                      workers->name()));
      return left;
    }
    watch(*workers, shared, left, heard);
    if (!workers->messages().empty()) places.insert(workers->messages());
    const bool left_behind = others || !claims_in(shared.folder()).empty();
    for (; !left.empty() && !stop::requested() && any_held(shared.folder()); usleep(200'000)) {
      look(shared, left, heard);
      heard.waiting(claims_in(shared.folder()).size(), "other workers");
    }
    look(shared, left, heard);
    if (stop::requested() || !left_behind) break;
    without_end = left.size() < before ? 0 : without_end + 1;
  }
  if (left.empty() || stop::requested()) return left;
  for (const std::string& place : places) log::error("messages of the workers: " + place);
  return left;
}

}  // namespace kvlab
