// Threadgroups that share the query heads of a KV head.
#pragma once

#ifndef HEAD_SPLITS
#define HEAD_SPLITS 1
#endif

// What they write of dk and dv: the gradients, or parts that flash_bwd_sum adds up.
#if HEAD_SPLITS > 1
using Result = float;
#else
using Result = ELEMENT;
#endif
