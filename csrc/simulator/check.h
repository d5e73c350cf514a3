// Checks of every memory access of a checked image.
#pragma once

namespace metal_attn::simulator {

struct Worker;

// Once the write is done.
void settle_rewrite(Worker& worker);
void engine_access(const void* address, unsigned bytes, unsigned flags, unsigned site);

}  // namespace metal_attn::simulator
