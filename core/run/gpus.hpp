// The GPUs of this machine as the driver names them. Nothing here makes a CUDA context: a worker chooses its GPU first.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "experiment/experiment.hpp"
#include "run/claims.hpp"

namespace kvlab {

// Names for CUDA_VISIBLE_DEVICES of the GPUs that this process may use.
std::vector<std::string> gpu_names();

// The first of them as every process knows it, 32 hexadecimal digits; "" without a driver.
std::string gpu_uuid();

bool measures_times(const Experiment& e);

// Whether any of them measures times on a GPU. Their workers then do not share one.
bool time_on_gpu(const std::vector<Experiment>& all);

// Claims this process's GPU. Errc::config where another process holds it: Slurm and people may give one GPU to two
// workers. Nothing where there is no GPU, or no locks and not strict. folder: OUT.parts of the pool's first experiment.
std::optional<Claim> claim_own_gpu(const std::string& folder, bool strict);
std::string gpus_folder(const std::string& folder);  // of these claims
// The same with the GPU's name given, for tests.
Claim claim_gpu(const std::string& uuid, const std::string& folder);

}  // namespace kvlab
