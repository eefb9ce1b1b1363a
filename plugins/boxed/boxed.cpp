// The boxed answers of MATH (Hendrycks et al. 2021; math_equivalence.py and the last \boxed of its evaluation).
#include <kvlab/plugin.hpp>
#include <kvlab/unicode.hpp>

#include "latex.hpp"

namespace {

using kvlab::unicode::from_utf8;
using kvlab::unicode::Text;

// A reference is a solution with a box, or the answer itself.
double boxed(const std::string& answer, const std::string& reference) {
  const auto given = latex::last_box(from_utf8(answer));
  if (!given) return 0;
  const Text text = from_utf8(reference);
  return latex::equal(*given, latex::last_box(text).value_or(text));
}

}  // namespace

KVLAB_PLUGIN(kvlab::metric<kvlab::FunctionMetric<boxed>>("boxed", "MATH: the last \\boxed is equal to the reference's"))
