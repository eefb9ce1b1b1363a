#include "result/sealed.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <kvlab/error.hpp>

namespace kvlab::results {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t block = 512;
constexpr const char* suffix = ".tmp";

[[noreturn]] void fail_io(const char* what, const std::string& path) {
  throw Error(Errc::io, std::string("got '") + std::strerror(errno) + "', wanted to " + what, path);
}

class Descriptor {
 public:
  Descriptor(const std::string& path, int flags, const char* what) : fd_(::open(path.c_str(), flags | O_CLOEXEC)) {
    if (fd_ < 0) fail_io(what, path);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { ::close(fd_); }
  int get() const { return fd_; }

 private:
  int fd_;
};

std::size_t read_some(int fd, char* to, std::size_t size, const std::string& path) {
  std::size_t got = 0;
  while (got < size) {
    const ssize_t n = ::read(fd, to + got, size - got);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("read the file", path);
    if (n == 0) break;
    got += static_cast<std::size_t>(n);
  }
  return got;
}

struct Seal {
  std::uint64_t bytes = 0, sum = 0;

  // Zero padded to the size of the block.
  std::array<char, block> text() const {
    std::array<char, block> out{};
    std::snprintf(out.data(), out.size(), "kvlab sealed 1\nbytes %" PRIu64 "\nsum %016" PRIx64 "\n", bytes, sum);
    return out;
  }
};

// Of everything after the user block. Every step is a bijection of the sum, so no change of a single word goes unseen.
Seal measure(int fd, const std::string& path) {
  if (::lseek(fd, block, SEEK_SET) < 0) fail_io("read the file", path);
  Seal seal;
  seal.sum = 0xcbf29ce484222325u;
  std::vector<char> buffer(1u << 20);
  for (;;) {
    const std::size_t got = read_some(fd, buffer.data(), buffer.size(), path);
    for (std::size_t at = 0; at < got; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, buffer.data() + at, std::min<std::size_t>(8, got - at));
      seal.sum = (seal.sum ^ word) * 0x9e3779b97f4a7c15u;
      seal.sum ^= seal.sum >> 32;
    }
    seal.bytes += got;
    if (got < buffer.size()) return seal;
  }
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "host";
  return name;
}

std::string temporary_name(const std::string& path) {
  return path + "." + host_name() + "." + std::to_string(::getpid()) + suffix;
}

std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

void sync(const std::string& path, int flags) {
  const Descriptor file(path, flags, "open it to sync");
  if (::fsync(file.get()) != 0) fail_io("sync", path);
}

}  // namespace

void seal(const std::string& path) {
  const Descriptor file(path, O_RDWR, "open the file");
  const auto text = measure(file.get(), path).text();
  if (::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    fail_io("write the seal", path);
}

void write_sealed(const std::string& path, const std::function<void(const h5::File&)>& fill) {
  std::error_code error;
  fs::create_directories(folder_of(path), error);
  if (error) throw Error(Errc::io, "got '" + error.message() + "', wanted to make the folder", folder_of(path));
  const std::string temporary = temporary_name(path);
  try {
    {
      h5::File file = h5::File::create(temporary, block);
      fill(file);
      file.close();
    }
    seal(temporary);
    sync(temporary, O_RDONLY);
    if (::rename(temporary.c_str(), path.c_str()) != 0) fail_io("rename the finished file", path);
    sync(folder_of(path), O_RDONLY | O_DIRECTORY);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

h5::File open_sealed(const std::string& path) {
  {
    const Descriptor file(path, O_RDONLY, "open the file");
    struct stat info {};
    if (::fstat(file.get(), &info) != 0) fail_io("read the file", path);
    if (!S_ISREG(info.st_mode)) throw Error(Errc::io, "got something else, wanted a regular file", path);
    std::array<char, block> head{};
    if (read_some(file.get(), head.data(), head.size(), path) != head.size() ||
        std::strncmp(head.data(), "kvlab sealed 1\n", 15) != 0)
      throw Error(Errc::result_file, "got a file without kvlab's seal, wanted a result file that kvlab wrote", path);
    Seal wanted;
    head.back() = '\0';
    if (std::sscanf(head.data(), "kvlab sealed 1\nbytes %" SCNu64 "\nsum %" SCNx64, &wanted.bytes, &wanted.sum) != 2)
      throw Error(Errc::result_file, "got a damaged seal, wanted a result file that kvlab wrote", path);
    const auto size = static_cast<std::uint64_t>(info.st_size) - block;
    if (size != wanted.bytes)
      throw Error(Errc::result_file,
                  "got " + std::to_string(size + block) + " bytes, wanted " + std::to_string(wanted.bytes + block),
                  path);
    if (measure(file.get(), path).sum != wanted.sum)
      throw Error(Errc::result_file, "got other bytes than kvlab wrote, wanted an unchanged file", path);
  }
  return h5::File::open(path);
}

void remove_abandoned(const std::string& folder) {
  const std::string host = "." + host_name() + ".";
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    const std::size_t at = name.rfind(host);
    if (at == std::string::npos || !entry.path().has_extension() || entry.path().extension() != suffix) continue;
    long pid = 0;
    if (std::sscanf(name.c_str() + at + host.size(), "%ld.tmp", &pid) != 1 || pid <= 0) continue;
    if (::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) fs::remove(entry.path(), ignored);
  }
}

}  // namespace kvlab::results
