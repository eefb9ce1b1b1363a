// Ends the process while the system's loader runs its constructors, as a damaged library does.
#include "by_hand.hpp"
[[gnu::constructor]] static void crash() { std::abort(); }
KVLAB_PLUGIN(kvlab::budget<Nothing>("crashing", "never gets that far"))
