/* Passes and reports that the driver adds to Mesa's compiler; mesa.patch calls them. */
#pragma once

#include "asahi/compiler/agx_compiler.h"

/* Uniform registers, by 16 bits: the number of threadgroups, then the kernel's buffers. */
#define GRID 0
#define BUFFERS 6

/* Passes over NIR, before Mesa lowers it for the GPU. */
void lens_lower_calls(nir_shader* nir);
void lens_narrow_threadgroup_addresses(nir_shader* nir);
void lens_fold_threadgroup_constants(nir_shader* nir);
void lens_fold_device_constants(nir_shader* nir);

/* A pass over NIR, just before instruction selection. */
void lens_compute_at_uses(nir_shader* nir);

/* A pass over instructions, before register allocation. */
void lens_schedule(agx_context* ctx);

/* The report. */
void lens_demand(unsigned halves);
void lens_enter_block(agx_context* ctx, agx_block* block, unsigned demand);
void lens_execute(agx_instr* instruction, unsigned demand);
void lens_print_peak(agx_context* ctx);
void lens_report(agx_context* ctx);
