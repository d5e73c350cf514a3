// The text of shaders/params.h that this extension is built with.
// torch_metal_attn/runtime/extension.py compares it with the file that kernels are compiled with:
// structs that differ look like races.
#include "shaders/params.h"  // so that build tools know that this file depends on it

#ifdef __APPLE__
#define CONSTANTS "__TEXT,__const"
#define NAME "_metal_attn_params_text"
#else
#define CONSTANTS ".rodata"
#define NAME "metal_attn_params_text"
#endif

asm(".section " CONSTANTS "\n.globl " NAME "\n" NAME
    ":\n.incbin \"shaders/params.h\"\n.byte 0\n.text\n");
