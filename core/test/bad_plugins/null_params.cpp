#include "by_hand.hpp"
BAD_ROLE(role.param_count = 1)
