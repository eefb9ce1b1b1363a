// equal_bytes: the budget with which a cell's policy holds so many bytes on the device.
#pragma once
#include <functional>

#include "run/cell_input.hpp"

namespace kvlab {

// A budget in tokens per KV head, and the bytes that a sequence then holds on the device.
struct HeldBytes {
  int tokens = 0;
  double bytes = 0;
};

inline constexpr int most_trials = 16;        // of a search
inline constexpr double bytes_apart = 0.02;   // share of `equal_bytes`: a cell that is farther off gets a warning
inline constexpr double bytes_equal = 0.005;  // share at which a search ends

// The trial whose bytes are nearest to `wanted`, among the budgets of [least, most] tokens. Of equal bytes the larger
// budget wins. held(tokens) is measured; it grows with the tokens, often page by page. It is infinite for a budget that
// does not fit, and minus infinity for one that is too small. Each budget is tried at most once.
HeldBytes nearest_budget(double wanted, int least, int most, int page_size, const std::function<double(int)>& held);

// Whether a run seeks the cell's budget. Without equal_bytes it does not. An entry without a budget has none to seek,
// and one that chooses pages and evicts nothing reads so many bytes of them.
bool seeks_budget(const CellInput& in);

// Finds the budget of a cell that seeks one; nothing for others. A trial runs the cell's first contexts, one sequence
// at a time, and takes the ledger's mean over decode steps, as the column `device_bytes_decode` does. Errc::config
// where the smallest budget that the policy takes holds more than that, by more than bytes_apart. NoRoom where not even
// that one fits.
std::optional<HeldBytes> equal_budget(const CellInput& in);

// Says in a warning what equal_bytes means for the cell where it is not met within bytes_apart. measured: the cell's
// device_bytes_decode. found: as equal_budget returned.
void note_equal_bytes(const CellInput& in, const std::optional<HeldBytes>& found, double measured);

}  // namespace kvlab
