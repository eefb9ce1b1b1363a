#include "run/shared_cells.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/log.hpp"
#include "base/new_file.hpp"
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

}  // namespace kvlab
