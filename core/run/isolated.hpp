// `--isolate` starts kvlab again for each cell, in a process of its own. Whatever a plugin does to that process, the
// run goes on, and the cell's row says how the process ended.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace kvlab {

using ShowProgress = std::function<void(const std::string& pass, int done, int total)>;

// How a cell's process ended.
struct CellEnd {
  bool written = false;  // its part is on the disk
  std::string status;    // else failed, or oom where the process lacked memory
  std::string error;
};

// Runs `command`, waits for its end, shows its progress, and hands on a signal that asks to stop. After such a signal
// it throws stop::Interrupted, unless the part was written. It throws CannotGoOn where no process can start, and where
// the process asks for that.
CellEnd run_cell_process(const std::vector<std::string>& command, const ShowProgress& progress);

// The other side, called in the cell's process.
namespace telling {
inline constexpr int descriptor = 3;
void begin();  // this process ends with the one that started it
void progress(const std::string& pass, int done, int total);
void no_memory(const std::string& what);
void cannot_go_on(const std::string& what);
void begun();    // the cell has begun: an earlier end of the process is not its fault
void written();  // the part is on the disk
}  // namespace telling

}  // namespace kvlab
