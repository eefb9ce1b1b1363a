#include "by_hand.hpp"
KVLAB_NOTE_ = kvlab::detail::note_of<SpoiledNote>();
extern "C" KVLAB_EXPORT int some_other_function() { return 1; }
