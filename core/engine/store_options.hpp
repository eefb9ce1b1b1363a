// The options of an engine's store.
#pragma once
#include "engine/engine.hpp"
#include "store/store.hpp"

namespace kvlab {

StoreOptions store_options(const Model& model, const Policy& policy, const EngineOptions& options);

}  // namespace kvlab
