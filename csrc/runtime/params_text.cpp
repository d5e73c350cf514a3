// The texts of shaders/params/*.h that this extension is built with, one after the other.
// torch_metal_attn/runtime/extension.py compares them with the files that kernels are compiled
// with: structs that differ look like races.

// For build tools, which see no dependency in .incbin.
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

#define TEXT_OF(header) ".incbin \"shaders/params/" #header ".h\"\n"
// In alphabetical order.
#define TEXTS(X)                                                                              \
  X(append)                                                                                   \
  X(attention)                                                                                \
  X(backward)                                                                                 \
  X(common) X(decode) X(index_scores) X(kv_formats) X(mask_blocks) X(merge) X(pages) X(probe) \
      X(rope) X(softmax)

asm(".section " CONSTANTS "\n.globl " NAME "\n" NAME ":\n" TEXTS(TEXT_OF) ".byte 0\n.text\n");
