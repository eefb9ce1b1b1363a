#include "by_hand.hpp"
KVLAB_PLUGIN(kvlab::budget<Nothing>("unversioned", "has no version").version(""))
