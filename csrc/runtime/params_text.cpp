// The concatenated texts of shaders/params/*.h with which this extension is built.
// torch_metal_attn/runtime/extension.py compares them with the files with which kernels are
// compiled: structs that differ would cause races or wrong results.

// Build tools do not see .incbin as a dependency.
#include "shaders/params/append.h"
#include "shaders/params/attention.h"
#include "shaders/params/backward.h"
#include "shaders/params/common.h"
#include "shaders/params/decode.h"
#include "shaders/params/index_scores.h"
#include "shaders/params/kv_formats.h"
#include "shaders/params/mask_blocks.h"
#include "shaders/params/merge.h"
#include "shaders/params/pages.h"
#include "shaders/params/probe.h"
#include "shaders/params/rope.h"
#include "shaders/params/softmax.h"

#ifdef __APPLE__
#define CONSTANTS "__TEXT,__const"
#define NAME "_metal_attn_params_text"
#else
#define CONSTANTS ".rodata"
#define NAME "metal_attn_params_text"
#endif

#define TEXT_OF(name) ".incbin \"shaders/params/" name ".h\"\n"

// In alphabetical order.
asm(".section " CONSTANTS "\n.globl " NAME "\n" NAME ":\n" TEXT_OF("append") TEXT_OF("attention")
        TEXT_OF("backward") TEXT_OF("common") TEXT_OF("decode") TEXT_OF("index_scores")
            TEXT_OF("kv_formats") TEXT_OF("mask_blocks") TEXT_OF("merge") TEXT_OF("pages")
                TEXT_OF("probe") TEXT_OF("rope") TEXT_OF("softmax") ".byte 0\n.text\n");
