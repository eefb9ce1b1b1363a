// Eigenvectors of a symmetric matrix in host memory, for profilers. No stream is involved.
#pragma once
#include <vector>

namespace kvlab {

struct Eigen {
  std::vector<double> values;   // falling
  std::vector<double> vectors;  // [vector][element], of length 1 and at right angles to each other
};

// Of a symmetric matrix [n, n] of finite numbers. Householder's tridiagonal form, then implicit QL steps. The sign of a
// vector is whatever comes out. So is the choice of vectors where eigenvalues are equal. Errc::internal: a matrix of
// another size. n^3 multiplications, several times.
Eigen eigen_of_symmetric(std::vector<double> matrix, int n);

}  // namespace kvlab
