# Writes kvlab/build_id.hpp: the version and a hash of the SDK headers. A loader compares them with those of a plugin.
file(GLOB_RECURSE KVLAB_API_HEADERS CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/core/api/*.hpp)
list(SORT KVLAB_API_HEADERS)
set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${KVLAB_API_HEADERS})
set(digests)
foreach(header ${KVLAB_API_HEADERS})
  file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/core/api ${header})
  file(SHA256 ${header} digest)
  string(APPEND digests "${name} ${digest}\n")
endforeach()
string(SHA256 KVLAB_API_HASH "${digests}")
string(SUBSTRING ${KVLAB_API_HASH} 0 12 KVLAB_API_HASH)
configure_file(${CMAKE_CURRENT_LIST_DIR}/build_id.hpp.in ${PROJECT_BINARY_DIR}/include/kvlab/build_id.hpp @ONLY)

# base/cuda_build.hpp, made by the build whenever one of its headers has changed.
set(KVLAB_CUDA_BUILD_FOLDER ${PROJECT_BINARY_DIR}/include-core)
set(core ${PROJECT_SOURCE_DIR}/core)
file(GLOB_RECURSE headers CONFIGURE_DEPENDS ${core}/api/*.hpp ${core}/base/*.hpp ${core}/ops/*.hpp ${core}/store/*.hpp
  ${core}/model/*.hpp)
add_custom_command(OUTPUT ${KVLAB_CUDA_BUILD_FOLDER}/base/cuda_build.hpp
  DEPENDS ${headers} ${CMAKE_CURRENT_LIST_DIR}/cuda_build.cmake VERBATIM COMMAND ${CMAKE_COMMAND} -DCORE=${core}
  -DOUT=${KVLAB_CUDA_BUILD_FOLDER}/base/cuda_build.hpp -P ${CMAKE_CURRENT_LIST_DIR}/cuda_build.cmake)
add_custom_target(kvlab_cuda_build DEPENDS ${KVLAB_CUDA_BUILD_FOLDER}/base/cuda_build.hpp)
