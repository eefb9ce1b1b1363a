#include "by_hand.hpp"
BAD_ROLE(role.name = nullptr)
