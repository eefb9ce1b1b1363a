// How much of the pages holds no token.
#pragma once
#include "store/ledger.hpp"

namespace kvlab {

class Store;

// Returns the bytes of a tier's pages, archives' included, for tokens that are not there, by the ledger's tags: all
// pages of a head are full but the last. Exact: it waits for the stream where the store's ledger() would.
Ledger::Row unused_bytes(const Store& store, Tier tier);

}  // namespace kvlab
