#include "by_hand.hpp"
BAD_ROLE(role.role = static_cast<kvlab::Role>(99))
