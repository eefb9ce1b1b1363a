#include "by_hand.hpp"
extern "C" int kvlab_defined_nowhere();
struct Undefined final : kvlab::Budget {
  void allot(const kvlab::Allotment&, kvlab::Stream) override { kvlab_defined_nowhere(); }
};
KVLAB_PLUGIN(kvlab::budget<Undefined>("undefined", "calls a function that is defined nowhere"))
