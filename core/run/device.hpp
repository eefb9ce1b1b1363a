// The device that an experiment runs on.
#pragma once
#include <kvlab/stream.hpp>

#include <string>
#include <vector>

#include "experiment/experiment.hpp"

namespace kvlab {

// backend: auto, cpu or cuda. auto is CUDA where there is a usable GPU. But it is the CPU for models of f32, and, with
// a warning, where cuBLASLt is missing. For cuda without a usable GPU or cuBLASLt it throws Errc::device and names what
// was found.
Device choose_device(const std::string& backend, const std::vector<DType>& models, const std::string& where);

// The experiment with `auto` replaced by this machine's backend.
Experiment with_backend(Experiment experiment);
inline Device device_of(const Experiment& with) { return with.backend == "cuda" ? Device::cuda : Device::cpu; }

}  // namespace kvlab
