// A claim says which process runs a cell. It is the file OUT.parts/ID.claim, which that process keeps locked (flock).
// The lock ends with the process, however that ends, and also holds between machines that share a file system.
#pragma once
#include <kvlab/error.hpp>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.hpp"

namespace kvlab {

// The file system has no locks, so a claim would hold nobody off.
class NoLocks final : public Error {
 public:
  using Error::Error;
};

// A process that no other process can be taken for: a number alone is used again.
struct ProcessName {
  std::string host, boot;  // the machine and its start
  long process = 0;
  long long started = 0;  // in clock ticks after the machine's start; 0 = the process is not there

  bool operator==(const ProcessName&) const = default;
};
ProcessName process_name(long process);  // of a process of this machine
bool lives(const ProcessName& name);     // false for one of another machine

// A claim that this process holds. Its destructor removes the file, so that another process may claim the cell.
class Claim {
 public:
  // Nothing while another process holds the claim. A file whose owner has ended is taken over. Throws NoLocks, and
  // Errc::io where the file cannot be made. folder: OUT.parts, which is made if it is missing.
  static std::optional<Claim> take(const std::string& folder, const std::string& id);

  static Claim none() { return {nullptr, ""}; }  // holds nobody off

  Claim(Claim&&) noexcept = default;
  Claim& operator=(Claim&&) = delete;
  ~Claim();

  // How many processes have ended while they held this claim, since a run began (forget_ended).
  int ended() const { return ended_; }
  const std::string& last() const { return last_; }  // the latest of them: "process 123 of HOST"

 private:
  Claim(std::unique_ptr<Descriptor> file, std::string path) : file_(std::move(file)), path_(std::move(path)) {}
  void read();
  void sign() const;

  std::unique_ptr<Descriptor> file_;  // null: moved away
  std::string path_;
  int ended_ = 0;
  std::string last_;
};

// A claim as another process sees it.
struct ClaimSeen {
  std::string id;
  ProcessName owner;
  std::string job;  // the owner's batch job; "-" = none
  int ended = 0;
};
std::vector<ClaimSeen> claims_in(const std::string& folder);

// Removes claims whose owners have ended. A run does so at its begin: an end that stopped the run before is no fault of
// the cell. Returns how many there were.
int forget_ended(const std::string& folder);
// Whether there is a claim whose owner lives, on whatever machine.
bool any_held(const std::string& folder);

// Whether a process of this machine runs another cell than `id` of the first folder now. folders: of all outputs whose
// workers are looked at; two outputs may have cells of one id.
bool runs_beside(const std::vector<std::string>& folders, const std::string& id);

// Whether a process of this machine has run another cell than that since this object was made, however shortly. The
// kernel notes claims that such processes write (inotify), so nothing has to look meanwhile. Where it takes no more
// watches, only cells that run at the begin and at the end are seen.
class Neighbours {
 public:
  Neighbours(std::vector<std::string> folders, std::string id);
  bool any();

 private:
  bool claimed_meanwhile() const;

  std::vector<std::string> folders_;
  std::string id_;
  Descriptor events_;
  int first_ = -1;  // the kernel's number for the first folder
  bool seen_;
};

}  // namespace kvlab
