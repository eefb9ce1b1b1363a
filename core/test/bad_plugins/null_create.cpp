#include "by_hand.hpp"
BAD_ROLE(role.create = nullptr)
