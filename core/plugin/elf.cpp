#include "plugin/elf.hpp"

#include <elf.h>
#include <fmt/format.h>

#include <cstring>
#include <fstream>
#include <kvlab/error.hpp>
#include <string>
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

}  // namespace

void check_library_file(const std::filesystem::path& path) {
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
}

}  // namespace kvlab
