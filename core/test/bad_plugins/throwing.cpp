#include "by_hand.hpp"
struct Throwing final : kvlab::Budget {
  explicit Throwing(const kvlab::Params& p) {
    if (p.get<int>("window") > p.get<int>("limit"))
      throw kvlab::Error(kvlab::Errc::config, "got a window above the limit, wanted at most the limit");
    if (p.get<bool>("odd")) throw 1;
  }
  void allot(const kvlab::Allotment&, kvlab::Stream) override {}
};
KVLAB_PLUGIN(kvlab::budget<Throwing>("throwing", "refuses in its constructor")
                 .param("window", 8, 0, kvlab::any, "above the limit by default")
                 .param("limit", 4, 0, kvlab::any, "largest window")
                 .param("odd", false, "throw what is no exception"))
