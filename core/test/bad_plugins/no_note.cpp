#include "by_hand.hpp"
static const kvlab_plugin plugin{KVLAB_ABI, sizeof(kvlab_plugin), KVLAB_BUILD, &never};
extern "C" KVLAB_EXPORT const kvlab_plugin* kvlab_plugin_entry() { return &plugin; }
