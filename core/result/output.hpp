// Whether a run may and can write its output, found out before its first cell, and that nobody else writes it
// meanwhile.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvlab::results {

enum class OutputKind : std::uint8_t { results, profile };

// Errc::result_file if a run could not write OUT in the end: it is a folder, a device or a file that kvlab did not
// write, a file of the other kind, or a file cannot be made in the nearest folder that is there. A symbolic link is
// followed. Leaves nothing behind.
void check_output(const std::string& out_path, OutputKind kind = OutputKind::results);

// Errc::result_file if OUT is one of the files that the run reads.
void check_apart(const std::string& out_path, const std::vector<std::string>& inputs);

// This process alone writes OUT while the object lives: the file OUT.lock, which names it, is locked (flock). The lock
// ends with the process, however that ends. A forked child neither needs nor releases it.
class OutputLock {
 public:
  // Errc::result_file with host and process of who holds it. Where the file system has no locks, it warns and goes on.
  // command: what runs, for others' messages.
  OutputLock(const std::string& out_path, const std::string& command);
  OutputLock(const OutputLock&) = delete;
  OutputLock& operator=(const OutputLock&) = delete;
  ~OutputLock();

 private:
  bool take();  // false: the file was removed meanwhile
  void sign(const std::string& command);
  [[noreturn]] void refuse_second() const;

  std::string path_;
  int fd_ = -1;
  long owner_;  // process
};

// Makes OUT's folder, locks OUT and checks it again; for results also makes OUT.parts and checks the parts of `ids`.
// Both can be written afterwards. Temporary files that killed processes left are removed.
[[nodiscard]] std::unique_ptr<OutputLock> open_output(const std::string& out_path, const std::string& command,
                                                      OutputKind kind = OutputKind::results,
                                                      const std::vector<std::string>& ids = {});

}  // namespace kvlab::results
