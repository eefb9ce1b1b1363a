# Flags shared by core, plugins and tests.
add_library(kvlab_flags INTERFACE)
target_compile_options(kvlab_flags INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers)
if(KVLAB_WERROR)
  target_compile_options(kvlab_flags INTERFACE -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 reports false positives of these in its own standard library.
  target_compile_options(kvlab_flags INTERFACE -Wno-restrict -Wno-stringop-overflow -Wno-array-bounds)
else()
  # Clang warns that sanitizers keep loops from being vectorized.
  target_compile_options(kvlab_flags INTERFACE -Wno-pass-failed)
endif()
if(KVLAB_FUZZ AND NOT KVLAB_SANITIZE)
  set(KVLAB_SANITIZE address,undefined)
endif()
if(KVLAB_SANITIZE)
  add_compile_options(-fsanitize=${KVLAB_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${KVLAB_SANITIZE})
  if(KVLAB_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=undefined)  # a finding fails its test
  endif()
endif()
if(KVLAB_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# Parsing the same large headers takes a third of a build. tools/check-std-includes shows which file lacks an include.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)  # for ccache
endif()
# nlohmann/json.hpp is not here: GCC instantiates its templates anew in each file, used or not, which takes 0.7 s.
set(KVLAB_LARGE_HEADERS <algorithm> <array> <chrono> <cmath> <filesystem> <fstream> <functional> <map> <memory> <mutex>
  <numeric> <optional> <random> <set> <span> <sstream> <string> <thread> <tuple> <unordered_map> <variant> <vector>
  <fmt/format.h>)
