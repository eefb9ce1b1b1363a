#include "by_hand.hpp"
BAD_PLUGIN(KVLAB_ABI, sizeof(kvlab_plugin), "gcc 1.0, SDK 000000000000", &never)
