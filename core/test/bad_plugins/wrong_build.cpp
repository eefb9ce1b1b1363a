#include "by_hand.hpp"
BAD_NOTE(KVLAB_ABI, sizeof(kvlab_plugin), "gcc 1.0, SDK 000000000000")
