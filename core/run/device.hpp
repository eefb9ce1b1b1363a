// Where an experiment runs.
#pragma once
#include <kvlab/stream.hpp>

#include <string>
#include <vector>

#include "experiment/experiment.hpp"

namespace kvlab {

// backend: auto, cpu or cuda. auto is CUDA where there is a usable GPU, but for models of f32, which run on the CPU
// alone, and (with a warning) where cuBLASLt is missing. Errc::device, naming what was found, for cuda without a usable
// GPU or without cuBLASLt.
Device choose_device(const std::string& backend, const std::vector<DType>& models, const std::string& where);

// The experiment with `auto` replaced by what it means on this machine.
Experiment with_backend(Experiment experiment);
inline Device device_of(const Experiment& with) { return with.backend == "cuda" ? Device::cuda : Device::cpu; }

}  // namespace kvlab
