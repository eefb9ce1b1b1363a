#include "by_hand.hpp"
extern "C" KVLAB_EXPORT int some_other_function() { return 1; }
