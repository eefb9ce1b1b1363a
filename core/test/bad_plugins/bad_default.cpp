#include "by_hand.hpp"
KVLAB_PLUGIN(kvlab::budget<Nothing>("bad_default", "its default is out of its range").param("window", 0, 1, 8, "w"))
