/* Compiles the SPIR-V of one kernel to instructions of Apple's G13, with Mesa's compiler:
 *
 *     agx_lens IN.spv FUNCTION THREADS
 *
 * bench/agx/listing.py reads the output. The order of passes is that of Mesa's asahi_clc.c. */

#include <stdio.h>
#include <sys/stat.h>

#include "asahi/compiler/agx_compile.h"
#include "asahi/compiler/agx_nir.h"
#include "compiler/glsl_types.h"
#include "compiler/nir/nir_builder.h"
#include "compiler/spirv/nir_spirv.h"
#include "lens.h"

/* Kernels have no textures; Mesa's file for them needs its OpenCL library. */
bool agx_nir_lower_texture(nir_shader* nir) { return false; }
bool agx_nir_lower_texture_early(nir_shader* nir, bool support_lod_bias) { return false; }
bool agx_nir_lower_multisampled_image_store(nir_shader* nir) { return false; }

static nir_shader* read_kernel(const char* path, const char* function, unsigned threads) {
  struct stat about;
  FILE* in = fopen(path, "rb");
  if (!in || stat(path, &about)) return NULL;
  uint32_t* words = malloc(about.st_size);
  size_t count = fread(words, 4, about.st_size / 4, in);
  fclose(in);
  struct spirv_to_nir_options options = {
      .environment = NIR_SPIRV_OPENCL,
      .shared_addr_format = nir_address_format_32bit_offset_as_64bit,
      .temp_addr_format = nir_address_format_32bit_offset_as_64bit,
      .global_addr_format = nir_address_format_64bit_global,
      .constant_addr_format = nir_address_format_64bit_global,
  };
  nir_shader* nir =
      spirv_to_nir(words, count, NULL, 0, MESA_SHADER_KERNEL, function, &options, &agx_nir_options);
  free(words);
  if (!nir) return NULL;
  nir->info.workgroup_size[0] = threads;
  nir->info.workgroup_size[1] = nir->info.workgroup_size[2] = 1;
  nir->info.workgroup_size_variable = false;
  nir->info.internal = false;
  return nir;
}

/* Drops the phi of a value that is undefined before a loop. Mesa makes structured loops of LLVM's
 * branches, and then carries a value of one iteration into the next ones, which never read it. */
static bool drop_stale(nir_builder* b, nir_instr* instr, void* unused) {
  if (instr->type != nir_instr_type_phi) return false;
  nir_phi_instr* phi = nir_instr_as_phi(instr);
  nir_cf_node* around = instr->block->cf_node.parent;
  if (around->type != nir_cf_node_loop) return false;
  nir_loop* loop = nir_cf_node_as_loop(around);
  if (instr->block != nir_loop_first_block(loop)) return false;
  nir_block* before = nir_cf_node_as_block(nir_cf_node_prev(around));
  nir_foreach_phi_src(source, phi) {
    if (source->pred != before || source->src.ssa->parent_instr->type != nir_instr_type_undef)
      continue;
    b->cursor = nir_before_impl(b->impl);
    nir_def_replace(&phi->def, nir_undef(b, phi->def.num_components, phi->def.bit_size));
    return true;
  }
  return false;
}

static void optimise(nir_shader* nir) {
  bool progress;
  do {
    progress = false;
    NIR_PASS(progress, nir, nir_split_var_copies);
    NIR_PASS(progress, nir, nir_split_struct_vars, nir_var_function_temp);
    NIR_PASS(progress, nir, nir_lower_var_copies);
    NIR_PASS(progress, nir, nir_lower_vars_to_ssa);
    NIR_PASS(progress, nir, nir_shader_instructions_pass, drop_stale, nir_metadata_control_flow,
             NULL);
    NIR_PASS(progress, nir, nir_copy_prop);
    NIR_PASS(progress, nir, nir_opt_remove_phis);
    NIR_PASS(progress, nir, nir_lower_phis_to_scalar, true);
    NIR_PASS(progress, nir, nir_opt_dce);
    NIR_PASS(progress, nir, nir_opt_dead_cf);
    NIR_PASS(progress, nir, nir_opt_cse);
    NIR_PASS(progress, nir, nir_opt_peephole_select, 4, false, true);
    NIR_PASS(progress, nir, nir_opt_phi_precision);
    NIR_PASS(progress, nir, nir_opt_algebraic);
    NIR_PASS(progress, nir, nir_opt_constant_folding);
    NIR_PASS(progress, nir, nir_opt_deref);
    NIR_PASS(progress, nir, nir_opt_copy_prop_vars);
    NIR_PASS(progress, nir, nir_opt_undef);
    NIR_PASS(progress, nir, nir_lower_undef_to_zero);
  } while (progress);
}

static void inline_functions(nir_shader* nir) {
  /* Some instructions need constant operands, so arguments of calls must be folded. */
  nir_lower_variable_initializers(nir, nir_var_function_temp);
  nir_opt_constant_folding(nir);
  lens_lower_calls(nir);
  nir_lower_returns(nir);
  nir_inline_functions(nir);
  nir_remove_non_entrypoints(nir);
  nir_lower_system_values(nir);
  nir_lower_compute_system_values_options options = {.global_id_is_32bit = true};
  nir_lower_compute_system_values(nir, &options);
}

static void lower_memory(nir_shader* nir) {
  const nir_variable_mode private_modes = nir_var_shader_temp | nir_var_function_temp;
  const nir_variable_mode device = nir_var_mem_constant | nir_var_mem_global;
  const nir_variable_mode offsets = nir_var_uniform | nir_var_mem_shared | private_modes;
  nir_copy_prop(nir);
  nir_opt_deref(nir);
  nir_lower_variable_initializers(nir, ~0);
  nir_lower_vars_to_explicit_types(nir, device | offsets, glsl_get_cl_type_size_align);
  optimise(nir);
  nir_remove_dead_variables(nir, nir_var_all, NULL);
  nir_lower_memcpy(nir);
  nir_lower_explicit_io(nir, device, nir_address_format_64bit_global);
  nir_lower_explicit_io(nir, offsets, nir_address_format_32bit_offset_as_64bit);
  optimise(nir);
  for (unsigned i = 0; i < 3; i++) {
    lens_narrow_threadgroup_addresses(nir);
    optimise(nir);
  }
  lens_fold_threadgroup_constants(nir);
  lens_fold_device_constants(nir);
  optimise(nir);
}

/* Addresses of buffers are in uniform registers. */
static bool lower_input(nir_builder* b, nir_intrinsic_instr* input, void* unused) {
  if (input->intrinsic != nir_intrinsic_load_kernel_input) return false;
  b->cursor = nir_before_instr(&input->instr);
  unsigned offset = nir_intrinsic_base(input) + nir_src_as_uint(input->src[0]);
  nir_def* value = nir_load_preamble(b, input->def.num_components, input->def.bit_size,
                                     .base = BUFFERS + offset / 2);
  nir_def_replace(&input->def, value);
  return true;
}

/* Metal's max and min do not flush denormals. */
static bool lower_extreme(nir_builder* b, nir_alu_instr* alu, void* unused) {
  if ((alu->op != nir_op_fmax && alu->op != nir_op_fmin) || alu->def.bit_size != 32) return false;
  alu->op = alu->op == nir_op_fmax ? nir_op_fmax_agx : nir_op_fmin_agx;
  return true;
}

static void lower_arithmetic(nir_shader* nir) {
  nir_lower_convert_alu_types(nir, NULL);
  nir_opt_if(nir, 0);
  nir_opt_idiv_const(nir, 16);
  optimise(nir);
  nir_opt_constant_folding(nir);
  nir_shader_intrinsics_pass(nir, lower_input, nir_metadata_control_flow, NULL);
  nir_lower_alu_to_scalar(nir, NULL, NULL);
  nir_shader_alu_pass(nir, lower_extreme, nir_metadata_control_flow, NULL);
  /* Values that are used only after a loop are computed after it. */
  nir_divergence_analysis(nir);
  nir_opt_sink(nir, nir_move_alu | nir_move_copies | nir_move_comparisons);
}

int main(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s IN.spv FUNCTION THREADS\n", argv[0]);
    return 1;
  }
  glsl_type_singleton_init_or_ref();
  nir_shader* nir = read_kernel(argv[1], argv[2], atoi(argv[3]));
  if (!nir) {
    fprintf(stderr, "%s has no kernel %s\n", argv[1], argv[2]);
    return 1;
  }
  inline_functions(nir);
  lower_memory(nir);
  lower_arithmetic(nir);
  nir->info.stage = MESA_SHADER_COMPUTE;
  nir_validate_shader(nir, "before Mesa's compiler");
  agx_preprocess_nir(nir, NULL);
  struct agx_shader_key key = {
      .has_scratch = true,
      .dev.soft_fault = true,
      .promote_constants = true,
      .reserved_preamble = BUFFERS + DIV_ROUND_UP(nir->num_uniforms, 2),
  };
  struct agx_shader_part part;
  agx_compile_shader_nir(nir, &key, NULL, &part);
  printf("code %u\nthreadgroup %u\n", part.info.main_size, part.info.local_size);
  return 0;
}
