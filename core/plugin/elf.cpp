#include "plugin/elf.hpp"

#include <elf.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <kvlab/error.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {
namespace {

#if defined(__x86_64__)
constexpr std::uint16_t machine = EM_X86_64;
#elif defined(__aarch64__)
constexpr std::uint16_t machine = EM_AARCH64;
#else
constexpr std::uint16_t machine = EM_NONE;  // any
#endif

// begin + length <= size, without overflow.
bool inside(std::uint64_t begin, std::uint64_t length, std::uint64_t size) {
  return begin <= size && length <= size - begin;
}

constexpr std::uint64_t most_note_bytes = 4 << 20;

// Returns kvlab's note of a segment. A note begins with three numbers: bytes of its owner's name with the final zero,
// bytes of its content, type. Name and content are padded to four bytes.
std::optional<std::string> our_note(std::string_view segment) {
  const auto padded = [](std::uint64_t bytes) { return (bytes + 3) / 4 * 4; };
  constexpr std::string_view owner("kvlab", 6);
  for (Elf64_Nhdr head; segment.size() >= sizeof head;) {
    std::memcpy(&head, segment.data(), sizeof head);
    segment.remove_prefix(sizeof head);
    const std::uint64_t content = padded(head.n_namesz);
    if (content + head.n_descsz > segment.size()) return std::nullopt;
    if (head.n_type == 1 && segment.substr(0, head.n_namesz) == owner)
      return std::string(segment.substr(content, head.n_descsz));
    segment.remove_prefix(std::min(content + padded(head.n_descsz), segment.size()));
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> read_note(const std::filesystem::path& path) {
  const auto refuse = [&](const std::string& message) { throw Error(Errc::plugin, message, path.string()); };
  std::error_code ec;
  if (!std::filesystem::exists(path, ec)) refuse("got no such file, wanted a plugin library; check the path");
  if (!std::filesystem::is_regular_file(path, ec))
    refuse("got no regular file, wanted a plugin library; check the path");
  const std::uint64_t size = std::filesystem::file_size(path, ec);
  std::ifstream file(path, std::ios::binary);
  if (ec || !file) refuse("got a file that cannot be read, wanted a plugin library; check its permissions");

  Elf64_Ehdr head{};
  file.read(reinterpret_cast<char*>(&head), sizeof head);
  if (file.gcount() < SELFMAG || std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0)
    refuse("got a file that is not an ELF library, wanted a compiled plugin; build the plugin and name its .so file");
  const std::string cut = "; the copy or the build was interrupted: build or copy the plugin again";
  if (file.gcount() < static_cast<std::streamsize>(sizeof head))
    refuse(fmt::format("got {} bytes, wanted at least an ELF header of {}", size, sizeof head) + cut);
  if (head.e_ident[EI_CLASS] != ELFCLASS64 || (machine != EM_NONE && head.e_machine != machine))
    refuse(
        fmt::format("got a library for another machine (ELF class {}, machine {}), wanted class {}, machine {}; "
                    "build the plugin on this machine",
                    head.e_ident[EI_CLASS], head.e_machine, int{ELFCLASS64}, machine));
  if (head.e_type != ET_DYN)
    refuse(fmt::format("got an ELF file of type {}, wanted a shared library ({}); link the plugin as a MODULE library",
                       head.e_type, int{ET_DYN}));
  const std::uint64_t table = std::uint64_t{head.e_phnum} * sizeof(Elf64_Phdr);
  if (head.e_phentsize != sizeof(Elf64_Phdr) || !inside(head.e_phoff, table, size))
    refuse(fmt::format("got {} bytes, wanted a program header table at byte {}", size, head.e_phoff) + cut);
  if (head.e_shoff != 0 && !inside(head.e_shoff, std::uint64_t{head.e_shnum} * head.e_shentsize, size))
    refuse(fmt::format("got {} bytes, wanted a section header table at byte {}", size, head.e_shoff) + cut);

  std::vector<Elf64_Phdr> segments(head.e_phnum);
  file.seekg(static_cast<std::streamoff>(head.e_phoff));
  file.read(reinterpret_cast<char*>(segments.data()), static_cast<std::streamsize>(table));
  if (!file) refuse("got an unreadable program header table, wanted a whole library" + cut);
  for (const Elf64_Phdr& segment : segments)
    if (segment.p_type != PT_NULL && !inside(segment.p_offset, segment.p_filesz, size))
      refuse(fmt::format("got {} bytes, wanted a segment of {} at byte {}", size, segment.p_filesz, segment.p_offset) +
             cut);

  for (const Elf64_Phdr& segment : segments) {
    if (segment.p_type != PT_NOTE || segment.p_filesz > most_note_bytes) continue;
    std::string bytes(segment.p_filesz, '\0');
    file.seekg(static_cast<std::streamoff>(segment.p_offset));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file) refuse("got an unreadable segment of notes, wanted a whole library" + cut);
    if (auto note = our_note(bytes)) return note;
  }
  return std::nullopt;
}

}  // namespace kvlab
