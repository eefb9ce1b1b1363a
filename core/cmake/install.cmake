# `cmake --install` gives the command line, libkvlab, the plugins, the SDK headers, the conformance suite and a CMake
# package, in a tree that may be moved. A build folder serves as the package too: -Dkvlab_DIR=BUILD/lib/cmake/kvlab.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvlab)

# A plugin links the headers and libkvlab. It hides all of its own symbols but the entry.
add_library(kvlab_sdk INTERFACE)
set_target_properties(kvlab_sdk PROPERTIES EXPORT_NAME sdk)
target_link_libraries(kvlab_sdk INTERFACE kvlab)
target_compile_features(kvlab_sdk INTERFACE cxx_std_20)
target_compile_options(kvlab_sdk INTERFACE -fvisibility=hidden -fvisibility-inlines-hidden)

install(TARGETS kvlab_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS kvlab_onednn LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET kvlab_cuda)
  install(TARGETS kvlab_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(TARGETS kvlab kvlab_sdk EXPORT kvlabTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/core/api/ ${PROJECT_BINARY_DIR}/include/
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(EXPORT kvlabTargets NAMESPACE kvlab:: DESTINATION ${package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# What `kvlab report --html` starts.
install(DIRECTORY ${PROJECT_SOURCE_DIR}/analysis/kvlab_results DESTINATION ${CMAKE_INSTALL_DATADIR}/kvlab/analysis
  FILES_MATCHING PATTERN "*.py" PATTERN __pycache__ EXCLUDE)

# What `kvlab reproduce` reads.
install(DIRECTORY ${PROJECT_SOURCE_DIR}/analysis/papers DESTINATION ${CMAKE_INSTALL_DATADIR}/kvlab/analysis
  FILES_MATCHING PATTERN "*.yaml")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/analysis/targets DESTINATION ${CMAKE_INSTALL_DATADIR}/kvlab/analysis
  FILES_MATCHING PATTERN "*.yaml" PATTERN "peers.py")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/experiments DESTINATION ${CMAKE_INSTALL_DATADIR}/kvlab
  FILES_MATCHING PATTERN "*.yaml" PATTERN "*.csv" PATTERN "*.h5")

# The conformance suite, which `kvlab conform` starts, with its models and vocabularies.
if(TARGET test_contract)
  install(PROGRAMS $<TARGET_FILE:test_contract> DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/kvlab RENAME conform)
  foreach(files golden/tiny golden/text data/vocab)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/core/test/${files}/
      DESTINATION ${CMAKE_INSTALL_DATADIR}/kvlab/conform/core/test/${files} FILES_MATCHING
      PATTERN "llama-*/*.json" PATTERN "llama-*/model.safetensors" PATTERN "english.txt" PATTERN "*.gguf" PATTERN "LICENSE"
      PATTERN adapter EXCLUDE PATTERN "mistral*" EXCLUDE PATTERN "qwen*" EXCLUDE)
  endforeach()
endif()

set(build_package_dir ${PROJECT_BINARY_DIR}/lib/cmake/kvlab)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/kvlabConfig.cmake.in ${build_package_dir}/kvlabConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${build_package_dir}/kvlabConfigVersion.cmake COMPATIBILITY ExactVersion)
install(FILES ${build_package_dir}/kvlabConfig.cmake ${build_package_dir}/kvlabConfigVersion.cmake
  DESTINATION ${package_dir})
export(EXPORT kvlabTargets NAMESPACE kvlab:: FILE ${build_package_dir}/kvlabTargets.cmake)
