// What the CPU can run, asked once. Each answer covers everything that the matching source files are compiled with.
#pragma once
#include <string>

namespace kvlab {

bool has_avx2();         // with FMA and F16C: *_avx2.cpp
bool has_avx512_bf16();  // with F, BW, VL and DQ: *_avx512.cpp
bool has_amx_bf16();

std::string cpu_name();  // as the operating system gives it

}  // namespace kvlab
