#include "base/put_off.hpp"

namespace kvlab {

namespace detail {
thread_local PutOff put_off;
}  // namespace detail

void run_all_put_off() {
  detail::PutOff& all = detail::put_off;
  const detail::PutOff now = all;
  all.count = 0;
  for (int i = 0; i < now.count; ++i) now.work[i]();
}

}  // namespace kvlab
