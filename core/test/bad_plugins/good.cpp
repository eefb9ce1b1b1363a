// The one sound library of this folder: two roles, parameters of every kind, and a throwing callback.
#include <kvlab/plugin.hpp>

namespace {

struct Good final : kvlab::Budget {
  explicit Good(const kvlab::Params& p) {
    p.get<bool>("flag");
    p.get<bool>("part");
    p.get<int>("count");
    p.get<double>("share");
    p.get<kvlab::GroupRule>("group");
    p.get<std::string>("note");
  }
  void allot(const kvlab::Allotment&, kvlab::Stream) override {
    throw kvlab::Error(kvlab::Errc::plugin, "got a call, wanted none");
  }
};

struct Plain final : kvlab::Codec {
  kvlab::CodecSpec spec() const override { return {{8}, {8}}; }
};

}  // namespace

KVLAB_PLUGIN(kvlab::budget<Good>("good", "every kind of parameter")
                 .param("flag", false, "a switch")
                 .component("part", "a part of the method")
                 .param("count", 4, 1, kvlab::any, "an integer")
                 .param("share", 0.5, 0, 1, "a real")
                 .param("group", kvlab::GroupRule::max, "a choice")
                 .param("note", "a \"text\" of two lines,\nlonger than a column", "a text"),
             kvlab::codec<Plain>("plain", "no parameters").version("2.5"))
