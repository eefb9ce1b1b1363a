#include "by_hand.hpp"
BAD_PLUGIN(KVLAB_ABI, sizeof(kvlab_plugin), nullptr, &never)
