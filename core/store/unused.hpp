// How much of the pages holds no token.
#pragma once
#include <array>

#include "store/ledger.hpp"

namespace kvlab {

class Store;

// Returns the bytes of pages for tokens that are not there, by tier, codec and the ledger's tags. All pages of a head
// are full but the last. Archives count, too. Exact: it waits for the stream, once, where the store's ledger() would.
std::array<Ledger::Rows, 2> unused_bytes(const Store& store);

}  // namespace kvlab
