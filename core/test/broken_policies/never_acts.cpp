// A budget that changes nothing: the policy never edits the cache.
#include "keeps.hpp"

namespace {

class NeverActs final : public kvlab::broken::KeepNewest {
 public:
  using KeepNewest::KeepNewest;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<NeverActs>("never_acts", "broken: keeps everything whatever the budget"))
