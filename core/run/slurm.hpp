// Workers as a job array of Slurm. Its programs wait for a controller, which may be away. So each has a limit of time:
// KVLAB_SLURM_SECONDS, 60 by default.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "run/workers.hpp"

namespace kvlab {

// Submits the job, or waits for the one that an earlier run submitted for the same cells. of: what it tells its
// workers. words: a worker's command. CannotStart where sbatch refuses it or does not answer.
std::unique_ptr<Workers> start_slurm(const Spread& spread, const std::string& of, const std::vector<std::string>& words,
                                     std::size_t cells, const std::string& folder);

}  // namespace kvlab
