// Checks before a run's first cell that the run may and can write its output, and locks the output for it.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvlab::results {

enum class OutputKind : std::uint8_t { results, profile, recording };

// Errc::result_file if a run could not write OUT in the end. OUT may be a folder, a device, a file that kvlab did not
// write or one of the other kind. The nearest folder that exists may take no file. Follows a symbolic link and leaves
// nothing behind.
void check_output(const std::string& out_path, OutputKind kind = OutputKind::results);

// Errc::result_file if OUT is one of the files that the run reads.
void check_apart(const std::string& out_path, const std::vector<std::string>& inputs);

// While the object lives, this process alone writes OUT: it locks the file OUT.lock (flock), whose text names it. The
// lock ends with the process, however that ends. A forked child neither needs nor releases it.
class OutputLock {
 public:
  // Errc::result_file names host and process of the holder. If the file system has no locks, it warns and goes on.
  // command: of this run, for others' messages.
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
  long owner_;  // process id
};

// Makes OUT's folder, locks OUT and checks it again. For results it also makes OUT.parts and checks the parts of `ids`.
// Both can be written afterwards. Removes temporary files that killed processes left.
[[nodiscard]] std::unique_ptr<OutputLock> open_output(const std::string& out_path, const std::string& command,
                                                      OutputKind kind = OutputKind::results,
                                                      const std::vector<std::string>& ids = {});

}  // namespace kvlab::results
