#include "by_hand.hpp"
BAD_NOTE(KVLAB_ABI + 1)
