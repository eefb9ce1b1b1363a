#include "by_hand.hpp"
BAD_ROLE(role.create = [](const kvlab::Params*, char*, std::size_t) -> void* { return nullptr; })
