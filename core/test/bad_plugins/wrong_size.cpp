#include "by_hand.hpp"
BAD_PLUGIN(KVLAB_ABI, sizeof(kvlab_plugin) + 8, KVLAB_BUILD, &never)
