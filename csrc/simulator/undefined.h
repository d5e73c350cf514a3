// Reports of checked images about a kernel's own arithmetic, private memory and control flow.
#pragma once

namespace metal_attn::simulator {

// Entries of __msl_engine (abi.h).
void engine_undefined(unsigned what, const void* about, unsigned long a, unsigned long b,
                      unsigned site);
unsigned engine_private_access(const char* address, unsigned bytes, unsigned lanes,
                               const char* base, unsigned size, char* marks, unsigned flags,
                               unsigned stored, unsigned site);
void engine_endless(unsigned site);
void engine_enter(unsigned site);

}  // namespace metal_attn::simulator
