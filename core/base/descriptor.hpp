// Owner of a file descriptor.
#pragma once
#include <unistd.h>

namespace kvlab {

// Its destructor closes the descriptor; below 0 = none.
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
