// Threadgroups that share the query heads of a KV head.
#pragma once

#include "tile.h"

#ifndef HEAD_SPLITS
#define HEAD_SPLITS 1
#endif

// What they write of dk and dv: the gradients, or parts that flash_bwd_sum adds up.
using Result = conditional_t<(HEAD_SPLITS > 1), float, ELEMENT>;
