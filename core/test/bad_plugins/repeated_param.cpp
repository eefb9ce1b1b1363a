#include "by_hand.hpp"
KVLAB_PLUGIN(kvlab::budget<Nothing>("repeated", "declares a parameter twice").param("w", 1, "w").param("w", 2, "w"))
