#pragma once

namespace kvlab {

const char* version();
const char* git_commit();  // that the build was configured at; "unknown" outside a checkout

}  // namespace kvlab
