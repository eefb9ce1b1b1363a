#include "by_hand.hpp"
extern "C" KVLAB_EXPORT const kvlab_plugin* kvlab_plugin_entry() { return nullptr; }
