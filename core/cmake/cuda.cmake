# libkvlab_cuda.so: every .cu of core, where there is an nvcc. core never links to it (base/backend.hpp loads it).
set(KVLAB_CUDA AUTO CACHE STRING "build libkvlab_cuda.so: AUTO (where nvcc is found), ON, OFF")
set(KVLAB_NVCC "")
if(NOT KVLAB_CUDA STREQUAL "OFF" AND NOT KVLAB_SANITIZE AND NOT KVLAB_FUZZ)
  find_program(KVLAB_NVCC_PROGRAM nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(KVLAB_NVCC_PROGRAM)
    set(KVLAB_NVCC ${KVLAB_NVCC_PROGRAM})
  elseif(KVLAB_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVLAB_CUDA=ON and no nvcc: put it on PATH or set CUDA_HOME")
  endif()
endif()
if(NOT KVLAB_NVCC)
  message(STATUS "no CUDA: the CPU part builds alone")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${KVLAB_NVCC})
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)  # CMake 3.25 does not know sm_90a
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD_DEFAULT "")  # nvcc 13 knows C++20, CMake 3.25 does not know that it does: no flags of its own
find_package(CUDAToolkit REQUIRED)
if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

file(GLOB_RECURSE KVLAB_CUDA_SOURCES CONFIGURE_DEPENDS base/*.cu ops/*.cu store/*.cu model/*.cu engine/*.cu bench/*.cu)
add_library(kvlab_cuda SHARED ${KVLAB_CUDA_SOURCES} ops/cudnn_attention.cpp)
target_include_directories(kvlab_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/api)  # not kvlab itself: its cxx_std_20 would be asked of nvcc
# #554: view.hpp's conversion to const of what is const.
target_compile_options(kvlab_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -gencode=arch=compute_90a,code=sm_90a
  --expt-relaxed-constexpr -diag-suppress=554 -lineinfo $<$<BOOL:${KVLAB_WERROR}>:-Werror=all-warnings>>)
if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
  target_compile_options(kvlab_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)  # a tenth of the size
endif()
target_link_libraries(kvlab_cuda PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS})

# cuDNN's front end is headers, from PyPI (tools/setup); cuDNN's own header comes with the CUDA toolkit or beside the
# library. The library itself is looked up at run time.
find_path(KVLAB_CUDNN_FRONTEND cudnn_frontend.h HINTS ${PROJECT_SOURCE_DIR}/build/cudnn-frontend/include
  DOC "folder of cudnn_frontend.h")
find_path(KVLAB_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} DOC "folder of cudnn.h")
if(KVLAB_CUDNN_FRONTEND AND KVLAB_CUDNN_INCLUDE)
  set_source_files_properties(ops/cudnn_attention.cpp PROPERTIES COMPILE_OPTIONS
    "-DKVLAB_CUDNN_FRONTEND;-isystem;${KVLAB_CUDNN_FRONTEND};-isystem;${KVLAB_CUDNN_INCLUDE};-isystem;${CUDAToolkit_INCLUDE_DIRS}")
else()
  message(STATUS "no cuDNN front end or no cudnn.h: a prompt's attention runs without cuDNN")
endif()
