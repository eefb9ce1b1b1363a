#include "result/h5.hpp"

#include <algorithm>
#include <utility>

#include "result/h5_detail.hpp"

namespace kvlab::h5 {

using namespace detail;

std::unique_lock<std::recursive_mutex> lock() {
  static std::recursive_mutex mutex;
  std::unique_lock<std::recursive_mutex> held(mutex);
  quiet();
  return held;
}

Handle::Handle(Handle&& other) noexcept
    : id_(std::exchange(other.id_, -1)), close_(std::exchange(other.close_, nullptr)) {}

Handle& Handle::operator=(Handle&& other) noexcept {
  if (this != &other) {
    reset();
    id_ = std::exchange(other.id_, -1);
    close_ = std::exchange(other.close_, nullptr);
  }
  return *this;
}

Handle::~Handle() { reset(); }

void Handle::reset() {
  if (id_ >= 0 && close_) close_(id_);
  id_ = -1;
}

Handle::Id Handle::release() { return std::exchange(id_, -1); }

Location Location::group(const std::string& path) const {
  return Location(own(H5Gopen2(handle_.get(), path.c_str(), H5P_DEFAULT), H5Gclose, "open a group", file_, path),
                  file_);
}

Location Location::create_group(const std::string& path) const {
  const Handle links = make_parents(file_);
  return Location(own(H5Gcreate2(handle_.get(), path.c_str(), links.get(), H5P_DEFAULT, H5P_DEFAULT), H5Gclose,
                      "create a group", file_, path),
                  file_);
}

bool Location::has(const std::string& path) const {
  for (std::size_t end = 0; end < path.size();) {
    end = std::min(path.find('/', end + 1), path.size());
    if (H5Lexists(handle_.get(), path.substr(0, end).c_str(), H5P_DEFAULT) <= 0) return false;
  }
  return true;
}

std::vector<std::string> Location::children(const std::string& path) const {
  const Location at = group(path);
  std::vector<std::string> names;
  const auto take = [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
    try {
      static_cast<std::vector<std::string>*>(out)->emplace_back(name);
      return 0;
    } catch (...) {
      return -1;
    }
  };
  check(H5Literate(at.handle_.get(), H5_INDEX_NAME, H5_ITER_INC, nullptr, take, &names), "list a group", file_, path);
  return names;
}

void Location::copy_to(const std::string& path, const Location& target, const std::string& target_path) const {
  const Handle links = make_parents(target.file_);
  check(H5Ocopy(handle_.get(), path.c_str(), target.handle_.get(), target_path.c_str(), H5P_DEFAULT, links.get()),
        "copy a group", file_, path);
}

namespace {

Handle access_list(const std::string& path) {
  Handle access = own(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "make a property list", path);
  // With SEMI it is an error to close a file while one of its objects is open. Otherwise the file stays open unseen.
  check(H5Pset_fclose_degree(access.get(), H5F_CLOSE_SEMI), "set a property", path);
  // Files need no lock, since they are written once under a temporary name. Network file systems refuse locks.
  check(H5Pset_file_locking(access.get(), false, true), "set a property", path);
  return access;
}

}  // namespace

File File::create(const std::string& name, std::size_t user_block) {
  quiet();
  constexpr std::size_t growth = 1u << 20;  // bytes by which the file's memory grows
  const Handle access = access_list(name);
  check(H5Pset_fapl_core(access.get(), growth, false), "set a property", name);
  const Handle creation = own(H5Pcreate(H5P_FILE_CREATE), H5Pclose, "make a property list", name);
  check(H5Pset_userblock(creation.get(), user_block), "set the user block", name);
  // No file has this name: HDF5 would read such a file first, and it refuses the name of an abandoned one.
  static std::int64_t made = 0;
  const std::string nowhere = name + "/in memory " + std::to_string(made++);
  return File(
      own(H5Fcreate(nowhere.c_str(), H5F_ACC_TRUNC, creation.get(), access.get()), H5Fclose, "create the file", name),
      name);
}

File File::open(const std::string& path) {
  quiet();
  const Handle access = access_list(path);
  return File(own(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose, "open an HDF5 file", path), path);
}

std::string_view File::bytes() const {
  check(H5Fflush(handle_.get(), H5F_SCOPE_GLOBAL), "finish the file", file_);
  void** memory = nullptr;
  check(H5Fget_vfd_handle(handle_.get(), H5P_DEFAULT, reinterpret_cast<void**>(&memory)), "find the file's memory",
        file_);
  const Handle creation = own(H5Fget_create_plist(handle_.get()), H5Pclose, "read a property list", file_);
  hsize_t user_block = 0;
  check(H5Pget_userblock(creation.get(), &user_block), "read the user block's size", file_);
  const ssize_t rest = H5Fget_file_image(handle_.get(), nullptr, 0);  // counted from the user block's end
  check(rest < 0 ? -1 : 0, "find the file's size", file_);
  return {static_cast<const char*>(*memory), static_cast<std::size_t>(user_block) + static_cast<std::size_t>(rest)};
}

void File::abandon() { handle_.release(); }

}  // namespace kvlab::h5
