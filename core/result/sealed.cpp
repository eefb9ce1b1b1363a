#include "result/sealed.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <kvlab/error.hpp>
#include <string_view>

#include "base/descriptor.hpp"
#include "base/new_file.hpp"

namespace kvlab::results {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t block = 512;
constexpr std::string_view magic = "kvlab sealed 1\n";

[[noreturn]] void fail_io(const char* what, const std::string& path) {
  throw Error(Errc::io, std::string("got '") + std::strerror(errno) + "', wanted to " + what, path);
}

// Without O_NONBLOCK, opening a FIFO would wait for a writer.
int open_to_read(const std::string& path) { return ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC); }

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

// Length and checksum of everything after the user block.
struct Seal {
  std::uint64_t bytes = 0, sum = 0xcbf29ce484222325u;

  // Every piece but the last has a multiple of 8 bytes. Every step is a bijection of the sum, so no change of a single
  // word goes unseen.
  void add(std::string_view piece) {
    for (std::size_t at = 0; at < piece.size(); at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, piece.data() + at, std::min<std::size_t>(8, piece.size() - at));
      sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
      sum ^= sum >> 32;
    }
    bytes += piece.size();
  }

  // Zero padded to the size of the block.
  std::array<char, block> text() const {
    std::array<char, block> out{};
    std::snprintf(out.data(), out.size(), "%sbytes %" PRIu64 "\nsum %016" PRIx64 "\n", magic.data(), bytes, sum);
    return out;
  }
};

Seal measure(int fd, const std::string& path) {
  Seal seal;
  std::vector<char> buffer(1u << 20);
  for (;;) {
    const std::size_t got = read_some(fd, buffer.data(), buffer.size(), path);
    seal.add({buffer.data(), got});
    if (got < buffer.size()) return seal;
  }
}

void write_image(const std::string& path, std::string_view image) {
  Seal seal;
  seal.add(image.substr(block));
  const auto head = seal.text();
  NewFile file(path, image.size());
  file.write(head.data(), head.size());
  file.write(image.data() + block, image.size() - block);
  file.take_name();
}

}  // namespace

Origin origin_of(const std::string& path) try {
  const Descriptor file(open_to_read(path));
  if (file < 0) return errno == ENOENT || errno == ENOTDIR ? Origin::absent : Origin::foreign;
  struct stat info {};
  if (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) return Origin::foreign;
  char head[magic.size()];
  const std::size_t got = read_some(file, head, sizeof head, path);
  return std::string_view(head, got) == magic.substr(0, got) ? Origin::ours : Origin::foreign;
} catch (const Error&) {
  return Origin::foreign;
}

void write_sealed(const std::string& path, const std::function<void(const h5::File&)>& fill) {
  if (origin_of(path) == Origin::foreign)
    throw Error(Errc::result_file, "got a file that kvlab did not write, wanted none there: it would be overwritten",
                path);
  const std::string folder = folder_of(follow_links(path));
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error(Errc::io, "got '" + error.message() + "', wanted to make the folder", folder);
  h5::File file = h5::File::create(path, block);
  std::string_view image;
  try {
    fill(file);
    image = file.bytes();
  } catch (...) {
    file.abandon();
    throw;
  }
  write_image(path, image);
}

h5::File open_sealed(const std::string& path, Look look) {
  {
    const Descriptor file(open_to_read(path));
    if (file < 0) fail_io("open the file", path);
    struct stat info {};
    if (::fstat(file, &info) != 0) fail_io("read the file", path);
    if (!S_ISREG(info.st_mode)) throw Error(Errc::io, "got something else, wanted a regular file", path);
    std::array<char, block> head{};
    if (read_some(file, head.data(), head.size(), path) != head.size() ||
        std::string_view(head.data(), magic.size()) != magic)
      throw Error(Errc::result_file, "got a file without kvlab's seal, wanted a result file that kvlab wrote", path);
    Seal wanted;
    head.back() = '\0';
    if (std::sscanf(head.data() + magic.size(), "bytes %" SCNu64 "\nsum %" SCNx64, &wanted.bytes, &wanted.sum) != 2)
      throw Error(Errc::result_file, "got a damaged seal, wanted a result file that kvlab wrote", path);
    const auto size = static_cast<std::uint64_t>(info.st_size) - block;
    if (size != wanted.bytes)
      throw Error(Errc::result_file,
                  "got " + std::to_string(size + block) + " bytes, wanted " + std::to_string(wanted.bytes + block),
                  path);
    if (look == Look::at_all_bytes && measure(file, path).sum != wanted.sum)
      throw Error(Errc::result_file, "got other bytes than kvlab wrote, wanted an unchanged file", path);
  }
  return h5::File::open(path);
}

}  // namespace kvlab::results
