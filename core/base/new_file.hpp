// A file that exists whole or not at all, even if the disk or the process fails.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvlab {

// The file that a chain of symbolic links leads to, which need not exist; `path` itself where it is no link. Errc::io
// if the links form a circle.
std::string follow_links(const std::string& path);

// write() fills a temporary file beside the target. take_name() syncs it and renames it to the target; without that
// call the destructor removes it. If the target is a symbolic link, the link stays and the file that it leads to is
// replaced. Every failure is Errc::io, names the file, and leaves the target unchanged.
class NewFile {
 public:
  // bytes: the size to be written, for messages.
  NewFile(const std::string& path, std::uint64_t bytes);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile();

  void write(const void* data, std::size_t size);
  void sync();
  void take_name();

 private:
  [[noreturn]] void fail(int reason) const;

  std::string target_, temporary_;
  std::uint64_t bytes_, written_ = 0;
  int fd_ = -1;
};

// Writes a whole text by NewFile.
void write_text(const std::string& path, const std::string& text);

// Bytes that a process without privileges may still write in the folder's file system; -1 = not known.
std::int64_t free_bytes(const std::string& folder);

std::string folder_of(const std::string& path);  // "." for a bare name
std::string host_name();                         // "host" if the system does not say

// Removes temporary files in `folder` that ended processes of this host left. With `target`: only those of that file.
void remove_abandoned(const std::string& folder, const std::string& target = {});

}  // namespace kvlab
