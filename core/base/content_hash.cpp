#include "base/content_hash.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <exception>
#include <kvlab/error.hpp>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/cache_folder.hpp"
#include "base/log.hpp"
#include "base/new_file.hpp"
#include "base/regular_file.hpp"
#include "base/sha256.hpp"
#include "base/stop.hpp"
#include "base/threads.hpp"
#include "base/xxh64.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t piece_bytes = 4 << 20;
constexpr std::uint64_t long_bytes = 1 << 30;  // takes seconds, so a message says so
constexpr int settled_seconds = 2;             // coarser than any file system's clock

std::int64_t nanoseconds(const timespec& t) { return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec; }

bool same_times(const struct stat& a, const struct stat& b) {
  return a.st_size == b.st_size && nanoseconds(a.st_mtim) == nanoseconds(b.st_mtim) &&
         nanoseconds(a.st_ctim) == nanoseconds(b.st_ctim);
}

// False if somebody wrote to the file while it was hashed, or so recently that another write may get the same time.
bool is_settled(const RegularFile& file) {
  struct stat now {};
  if (::fstat(file.descriptor(), &now) != 0 || !same_times(now, file.status())) return false;
  timespec clock{};
  clock_gettime(CLOCK_REALTIME, &clock);
  return nanoseconds(clock) - nanoseconds(now.st_ctim) > settled_seconds * std::int64_t{1'000'000'000};
}

// The state of a file for which its remembered hash holds.
std::string identity(const struct stat& s) {
  return fmt::format("{} {} {} {} {}", s.st_dev, s.st_ino, s.st_size, nanoseconds(s.st_mtim), nanoseconds(s.st_ctim));
}

std::string record_of(const std::string& identity, const std::string& hash) {
  const std::string text = identity + " " + hash;
  return fmt::format("{} {:016x}\n", text, xxh64(text));
}

// The hash in a record; empty if the record is damaged or describes another state of the file.
std::string hash_in(const std::string& record, const std::string& identity) {
  if (!record.starts_with(identity + " ")) return {};
  const std::size_t begin = identity.size() + 1, end = record.find(' ', begin);
  if (end == std::string::npos) return {};
  const std::string hash = record.substr(begin, end - begin);
  return record == record_of(identity, hash) ? hash : std::string();
}

// A record that cannot be written costs time at the next run, nothing else.
void write_record(const fs::path& path, const std::string& record) {
  std::error_code ignored;
  fs::create_directories(path.parent_path(), ignored);
  try {
    NewFile file(path.string(), record.size());
    file.write(record.data(), record.size());
    file.take_name();
  } catch (const Error&) {
  }
}

std::string read_record(const fs::path& path) {
  try {
    return read_file(path, "a remembered hash", 4096);
  } catch (const Error&) {
    return {};
  }
}

std::uint64_t hash_piece(const RegularFile& file, std::uint64_t begin, std::string& piece) {
  stop::check();
  piece.resize(static_cast<std::size_t>(std::min<std::uint64_t>(piece_bytes, file.size() - begin)));
  if (file.read(begin, piece.data(), piece.size()) != piece.size())
    throw Error(Errc::io, "got a file that became shorter while it was read, wanted one that nobody changes");
  return xxh64(piece);
}

// It starts its own threads: after a parallel region of OpenMP, one in a forked child would hang (base/threads.hpp).
std::string hash_pieces(const RegularFile& file) {
  const std::uint64_t pieces = (file.size() + piece_bytes - 1) / piece_bytes;
  std::vector<std::uint64_t> hashes(pieces);
  std::atomic<std::uint64_t> next{0};
  std::exception_ptr failure;
  std::mutex guard;
  const auto work = [&] {
    try {
      std::string piece;
      for (std::uint64_t i = next++; i < pieces; i = next++) hashes[i] = hash_piece(file, i * piece_bytes, piece);
    } catch (...) {
      const std::lock_guard lock(guard);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  const auto most = std::min<std::uint64_t>(static_cast<std::uint64_t>(std::min(usable_cores(), 8)), pieces);
  try {
    for (std::uint64_t i = 1; i < most; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {  // the system refuses more threads: those that run do the work
  }
  work();
  for (std::thread& t : others) t.join();
  if (failure) std::rethrow_exception(failure);
  hashes.push_back(file.size());
  const auto* bytes = reinterpret_cast<const char*>(hashes.data());
  return fmt::format("{:016x}", xxh64({bytes, hashes.size() * sizeof hashes[0]}));
}

std::string hash_sha256(const RegularFile& file) {
  Sha256 sha;
  std::string piece(static_cast<std::size_t>(std::min<std::uint64_t>(piece_bytes, file.size() + 1)), '\0');
  for (std::uint64_t at = 0;;) {
    stop::check();
    const std::size_t got = file.read(at, piece.data(), piece.size());
    sha.add({piece.data(), got});
    at += got;
    if (got < piece.size()) return sha.hex();
  }
}

}  // namespace

std::string ContentHashes::remembered(const fs::path& path, const char* kind,
                                      const std::function<std::string(const RegularFile&)>& hash) {
  const RegularFile file(path);
  const auto hashed = [&] {
    bytes_hashed_ += file.size();
    if (file.size() >= long_bytes)
      log::info(fmt::format("hashing {} ({:.1f} GB): not again until it changes", path.string(),
                            static_cast<double>(file.size()) / 1e9));
    try {
      return hash(file);
    } catch (const Error& e) {
      throw Error(e.code(), e.message(), path.string());
    }
  };
  if (file.size() < remembered_from) return hashed();
  const std::string state = identity(file.status()), key = state + " " + kind;
  if (const auto known = known_.find(key); known != known_.end()) return known->second;
  const fs::path record = folder_ / fmt::format("{:x}-{:x}.{}", file.status().st_dev, file.status().st_ino, kind);
  if (std::string before = hash_in(read_record(record), state); !before.empty())
    return known_.emplace(key, std::move(before)).first->second;
  std::string now = hashed();
  if (is_settled(file)) {
    known_.emplace(key, now);
    write_record(record, record_of(state, now));
  }
  return now;
}

std::string ContentHashes::of(const fs::path& path) { return remembered(path, "xxh64", hash_pieces); }

std::string ContentHashes::sha256_of(const fs::path& path) { return remembered(path, "sha256", hash_sha256); }

ContentHashes& content_hashes() {
  static ContentHashes hashes(cache_folder() / "hashes");
  return hashes;
}

}  // namespace kvlab
