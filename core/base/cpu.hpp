// Instruction sets of the CPU, read once. Each answer covers every set that the matching source files are compiled for.
#pragma once
#include <string>

namespace kvlab {

bool has_avx2();         // with FMA and F16C: *_avx2.cpp
bool has_avx512_bf16();  // with F, BW, VL and DQ: *_avx512.cpp
bool has_amx_bf16();

std::string cpu_name();  // as the operating system gives it

}  // namespace kvlab
