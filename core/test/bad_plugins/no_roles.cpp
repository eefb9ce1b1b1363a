#include "by_hand.hpp"
static const kvlab_role* none(std::size_t* count, char*, std::size_t) {
  static const kvlab_role role = sound_role();
  *count = 0;
  return &role;
}
BAD_PLUGIN(KVLAB_ABI, sizeof(kvlab_plugin), KVLAB_BUILD, &none)
