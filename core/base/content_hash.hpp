// Hashes of whole files. A large file's hash is remembered, so the next run does not read the file.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

namespace kvlab {

class RegularFile;

// A remembered hash holds while the file's device, inode, size, modification and change time stay the same. The kernel
// sets the change time, so it shows a write whose modification time was set back. A file that changed in the last two
// seconds is not remembered: the clock of its times may not have ticked since.
class ContentHashes {
 public:
  static constexpr std::uint64_t remembered_from = 4 << 20;  // bytes; smaller files are hashed every time

  // folder: holds the remembered hashes. It need not exist. A file with a damaged record is hashed again.
  explicit ContentHashes(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // 16 hexadecimal digits: XXH64 over the XXH64 of each piece of 4 MiB and the file's size. Errc::io.
  std::string of(const std::filesystem::path& path);
  // SHA-256 in 64 digits, to compare with a published one; 20 times slower.
  std::string sha256_of(const std::filesystem::path& path);

  std::uint64_t bytes_hashed() const { return bytes_hashed_; }  // read so far; a remembered hash reads none

 private:
  std::string remembered(const std::filesystem::path& path, const char* kind,
                         const std::function<std::string(const RegularFile&)>& hash);

  std::filesystem::path folder_;
  std::map<std::string, std::string> known_;  // by state and kind; serves where the folder cannot be written
  std::uint64_t bytes_hashed_ = 0;
};

// The program's hashes, remembered in the cache folder. Not thread-safe.
ContentHashes& content_hashes();

}  // namespace kvlab
