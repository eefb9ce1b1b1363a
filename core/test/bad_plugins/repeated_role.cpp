#include "by_hand.hpp"
KVLAB_PLUGIN(kvlab::budget<Nothing>("twice", "first"), kvlab::budget<Nothing>("twice", "second"))
