#include "by_hand.hpp"
static kvlab::Registration fail() { throw kvlab::Error(kvlab::Errc::plugin, "got trouble while registering"); }
KVLAB_PLUGIN(fail())
