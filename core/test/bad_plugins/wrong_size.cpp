#include "by_hand.hpp"
BAD_NOTE(KVLAB_ABI, sizeof(kvlab_plugin) + 8)
