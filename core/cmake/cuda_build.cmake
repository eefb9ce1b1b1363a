# base/cuda_build.hpp: a hash of the headers that libkvlab.so and libkvlab_cuda.so share, which they compare when they
# meet.
#   cmake -DCORE=FOLDER -DOUT=FILE -P cuda_build.cmake
file(GLOB_RECURSE headers RELATIVE ${CORE} ${CORE}/api/*.hpp ${CORE}/base/*.hpp ${CORE}/ops/*.hpp ${CORE}/store/*.hpp
  ${CORE}/model/*.hpp)
list(SORT headers)
set(digests)
foreach(header ${headers})
  file(SHA256 ${CORE}/${header} digest)
  string(APPEND digests "${header} ${digest}\n")
endforeach()
string(SHA256 hash "${digests}")
file(WRITE ${OUT} "#define KVLAB_CUDA_BUILD \"${hash}\"\n")
