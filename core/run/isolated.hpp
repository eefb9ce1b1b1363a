// `--isolate`: each cell in a process of its own, kvlab started again for that cell. Whatever its plugins do to it, the
// run goes on, and the cell's row says how its process ended.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace kvlab {

using ShowProgress = std::function<void(const std::string& pass, int done, int total)>;

// How a cell's process ended.
struct CellEnd {
  bool written = false;  // its part is on the disk
  std::string status;    // else: failed | oom: the system killed it for memory, or it said so
  std::string error;
};

// Runs `command`, waits for its end, shows the progress that it tells, and hands on the signals that ask to stop: then
// it throws stop::Interrupted, unless the part was written. CannotGoOn where there is no process to be had, and where
// the process says so.
CellEnd run_cell_process(const std::vector<std::string>& command, const ShowProgress& progress);

// The other side of it, in the cell's process.
namespace telling {
inline constexpr int descriptor = 3;
void begin();  // ends with the process that started it
void progress(const std::string& pass, int done, int total);
void no_memory(const std::string& what);
void cannot_go_on(const std::string& what);
void begun();    // the cell: before that no end of the process is its fault
void written();  // the part
}  // namespace telling

}  // namespace kvlab
