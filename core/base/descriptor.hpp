// An open file of this process, by its number.
#pragma once
#include <unistd.h>

namespace kvlab {

// Closes it at its end; below 0 = there is none.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  operator int() const { return fd_; }

 private:
  int fd_;
};

}  // namespace kvlab
