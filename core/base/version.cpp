#include "base/version.hpp"

namespace kvlab {

const char* version() { return KVLAB_VERSION_TEXT; }
const char* git_commit() { return KVLAB_GIT_COMMIT; }

}  // namespace kvlab
