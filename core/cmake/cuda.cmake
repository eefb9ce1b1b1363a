# Builds libkvlab_cuda.so from every .cu of core, where there is a CUDA toolkit that can. core never links to it:
# base/backend.hpp loads it.
set(KVLAB_CUDA AUTO CACHE STRING "build libkvlab_cuda.so: AUTO (where a CUDA toolkit can), ON, OFF")
option(KVLAB_CUDA_QUICK "compile kernels in a fifth of the time, for machines that never run them: they are slow" OFF)
set(KVLAB_CUDA_OLDEST 12.5)  # cudaGetDriverEntryPointByVersion
if(KVLAB_CUDA STREQUAL "OFF" OR KVLAB_SANITIZE OR KVLAB_FUZZ)
  message(STATUS "no CUDA: the CPU part builds alone")
  return()
endif()

# Sets `missing` to the reason ("got X, wanted Y") where nvcc cannot build it, else leaves it as it is.
function(kvlab_check_nvcc nvcc missing)
  set(wanted "wanted nvcc ${KVLAB_CUDA_OLDEST} or newer: put it on PATH or set CUDA_HOME")
  if(NOT nvcc)
    set(${missing} "got no nvcc, ${wanted}" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
  if(NOT status EQUAL 0 OR NOT text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${missing} "got ${nvcc}, which does not tell its version, ${wanted}" PARENT_SCOPE)
    return()
  endif()
  set(version ${CMAKE_MATCH_1})
  if(version VERSION_LESS KVLAB_CUDA_OLDEST)
    set(${missing} "got nvcc ${version} (${nvcc}), ${wanted}" PARENT_SCOPE)
    return()
  endif()
  # The probe needs the toolkit's other parts, which Debian and NVIDIA pack one by one, and a host compiler that nvcc takes.
  if("${KVLAB_NVCC_WORKS}" STREQUAL "${nvcc} ${version}")
    return()
  endif()
  set(folder ${CMAKE_BINARY_DIR}/CMakeFiles/kvlab_cuda)
  file(WRITE ${folder}/probe.cu "#include <cublasLt.h>\n#include <cuda.h>\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
    "int main() { return cudaGetDriverEntryPointByVersion(nullptr, nullptr, 12000, cudaEnableDefault, nullptr); }\n")
  set(host)
  if(CMAKE_CUDA_HOST_COMPILER)
    set(host -ccbin ${CMAKE_CUDA_HOST_COMPILER})
  elseif(DEFINED ENV{CUDAHOSTCXX})
    set(host -ccbin $ENV{CUDAHOSTCXX})
  endif()
  execute_process(COMMAND ${nvcc} ${host} -std=c++20 -gencode=arch=compute_90a,code=sm_90a -o probe probe.cu
    WORKING_DIRECTORY ${folder} OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
  if(status EQUAL 0)
    set(KVLAB_NVCC_WORKS "${nvcc} ${version}" CACHE INTERNAL "")
    return()
  endif()
  string(REGEX MATCH "[^\n]*(error|fatal|cannot)[^\n]*" why "${text}")
  set(${missing} "got nvcc ${version} (${nvcc}) that does not build with its headers and libraries (${why}), wanted a whole toolkit and a compiler that it takes" PARENT_SCOPE)
endfunction()

set(nvcc ${CMAKE_CUDA_COMPILER})
if(NOT nvcc)
  find_program(KVLAB_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin DOC "nvcc of libkvlab_cuda.so")
  set(nvcc ${KVLAB_NVCC})
endif()
set(missing)
kvlab_check_nvcc("${nvcc}" missing)
if(missing AND KVLAB_CUDA STREQUAL "ON")
  message(FATAL_ERROR "KVLAB_CUDA=ON: ${missing}")
elseif(missing)
  message(STATUS "no CUDA, the CPU part builds alone: ${missing}")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${nvcc})
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)  # CMake 3.25 does not know sm_90a
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD_DEFAULT "")  # CMake 3.25 does not know that nvcc 13 has C++20: it shall add no flag
find_package(CUDAToolkit REQUIRED)
if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

file(GLOB_RECURSE KVLAB_CUDA_SOURCES CONFIGURE_DEPENDS base/*.cu ops/*.cu store/*.cu model/*.cu cases/*.cu)
add_library(kvlab_cuda SHARED ${KVLAB_CUDA_SOURCES} ops/attend/cudnn_attention.cpp)
add_dependencies(kvlab_cuda kvlab_cuda_build)
target_include_directories(kvlab_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/api ${KVLAB_CUDA_BUILD_FOLDER})  # does not link kvlab: CMake would ask nvcc for its cxx_std_20
# #554: nvcc warns that a view of const elements never uses view.hpp's conversion to const.
target_compile_options(kvlab_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -gencode=arch=compute_90a,code=sm_90a
  --expt-relaxed-constexpr -diag-suppress=554 $<$<CONFIG:RelWithDebInfo,Debug>:-lineinfo>
  $<$<BOOL:${KVLAB_WERROR}>:-Werror=all-warnings>>)
if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
  target_compile_options(kvlab_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)  # a tenth of the size
endif()
if(KVLAB_CUDA_QUICK AND CUDAToolkit_VERSION VERSION_LESS 13.0)
  message(STATUS "KVLAB_CUDA_QUICK takes nvcc 13, got ${CUDAToolkit_VERSION}: kernels are compiled as ever")
elseif(KVLAB_CUDA_QUICK)
  target_compile_options(kvlab_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
  target_compile_definitions(kvlab_cuda PRIVATE KVLAB_CUDA_QUICK)
endif()
target_link_libraries(kvlab_cuda PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS} -Wl,--exclude-libs,ALL,--gc-sections)

# cuDNN's front end is a set of headers from PyPI (tools/setup). cudnn.h comes with the CUDA toolkit or beside cuDNN's
# library, which kvlab looks up at run time. -Os halves the time to compile the headers, and -O0 halves it again. cuDNN's
# kernels do the work. What nobody calls or looks up would take half a megabyte.
find_path(KVLAB_CUDNN_FRONTEND cudnn_frontend.h HINTS ${PROJECT_SOURCE_DIR}/build/cudnn-frontend/include
  DOC "folder of cudnn_frontend.h")
find_path(KVLAB_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} DOC "folder of cudnn.h")
if(KVLAB_CUDNN_FRONTEND AND KVLAB_CUDNN_INCLUDE)
  set_source_files_properties(ops/attend/cudnn_attention.cpp PROPERTIES COMPILE_OPTIONS
    "$<IF:$<BOOL:${KVLAB_CUDA_QUICK}>,-O0,-Os>;-fvisibility=hidden;-ffunction-sections;-fdata-sections;-DKVLAB_CUDNN_FRONTEND;-isystem;${KVLAB_CUDNN_FRONTEND};-isystem;${KVLAB_CUDNN_INCLUDE};-isystem;${CUDAToolkit_INCLUDE_DIRS}")
else()
  message(STATUS "no cuDNN front end or no cudnn.h: a prompt's attention runs without cuDNN")
endif()
