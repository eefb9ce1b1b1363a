#include "by_hand.hpp"
BAD_PLUGIN(KVLAB_ABI + 1, sizeof(kvlab_plugin), KVLAB_BUILD, &never)
