// Hashes of whole files. Every byte counts; a large file's hash is remembered, so that the next run reads nothing.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

namespace kvlab {

class RegularFile;

// A remembered hash holds while the file's device, inode, size, modification and change time are the same. The change
// time is the kernel's: who writes into a file and sets its modification time back still changes it. A file that
// changed within the last seconds is not remembered, because the clock of its times may not have ticked since.
class ContentHashes {
 public:
  static constexpr std::uint64_t remembered_from = 4 << 20;  // bytes; smaller files are hashed every time

  // folder: of the remembered hashes. It need not exist; what is unreadable or damaged there is hashed again.
  explicit ContentHashes(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // 16 hexadecimal digits: XXH64 over the XXH64 of each piece of 4 MiB, pieces in parallel. Errc::io.
  std::string of(const std::filesystem::path& path);
  // SHA-256 in 64 digits, for comparison with a published one; 20 times slower.
  std::string sha256_of(const std::filesystem::path& path);

  std::uint64_t bytes_hashed() const { return bytes_hashed_; }  // read so far, remembered hashes left out

 private:
  std::string remembered(const std::filesystem::path& path, const char* kind,
                         const std::function<std::string(const RegularFile&)>& hash);

  std::filesystem::path folder_;
  std::map<std::string, std::string> known_;  // by record: of this process, also where the folder cannot be written
  std::uint64_t bytes_hashed_ = 0;
};

// The program's own, in the cache folder. Not thread-safe.
ContentHashes& content_hashes();

}  // namespace kvlab
