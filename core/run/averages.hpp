// Averages of measured numbers.
#pragma once
#include <vector>

namespace kvlab {

// NaN means not measured and is left out. A measured number that is not finite never gets here: it ends the cell.
double mean(const std::vector<double>& values);               // NaN when there is none
double percentile(std::vector<double> values, double share);  // nearest rank; NaN when there is none

}  // namespace kvlab
