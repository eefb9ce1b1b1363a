#include "by_hand.hpp"
KVLAB_NOTE_ = kvlab::detail::note_of<SpoiledNote>();
extern "C" KVLAB_EXPORT const kvlab_plugin* kvlab_plugin_entry() { return nullptr; }
