#include "by_hand.hpp"
extern "C" int kvlab_absent();
struct Absent final : kvlab::Budget {
  void allot(const kvlab::Allotment&, kvlab::Stream) override { kvlab_absent(); }
};
KVLAB_PLUGIN(kvlab::budget<Absent>("absent", "calls a library that is not there"))
