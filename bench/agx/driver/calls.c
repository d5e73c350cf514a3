/* Replaces calls of agx_* functions, which bench/gpu_headers/__msl_engine.h declares, by NIR. */

#include "compiler/nir/nir_builder.h"
#include "lens.h"

static nir_def* component(nir_builder* b, nir_def* vector, nir_src axis) {
  return nir_channel(b, vector, nir_src_as_uint(axis));
}

static nir_def* shuffled(nir_builder* b, nir_def* word, nir_src lane) {
  return nir_src_is_const(lane) ? nir_read_invocation(b, word, lane.ssa)
                                : nir_shuffle(b, word, lane.ssa);
}

static nir_def* shuffled_xor(nir_builder* b, nir_def* word, nir_src mask) {
  return nir_src_is_const(mask) ? nir_shuffle_xor_uniform_ir3(b, word, mask.ssa)
                                : nir_shuffle_xor(b, word, mask.ssa);
}

/* Converts a pair of bfloats (element 'b') to floats; other pairs do not change. */
static nir_def* factor(nir_builder* b, nir_def* pair, char element) {
  if (element != 'b') return pair;
  nir_def* word = nir_pack_32_2x16(b, pair);
  return nir_vec2(b, nir_ishl_imm(b, word, 16), nir_iand_imm(b, word, 0xffff0000));
}

static nir_def* product(nir_builder* b, const char* elements, nir_src* arguments) {
  nir_def* left = factor(b, arguments[0].ssa, elements[0]);
  nir_def* right = factor(b, arguments[1].ssa, elements[1]);
  return nir_simd_matrix_fmadd_agx(b, left, right, arguments[2].ssa);
}

static nir_def* value_of(nir_builder* b, const char* name, nir_src* arguments) {
#define IS(function) (!strcmp(name, "agx_" function))
  if (IS("lane")) return nir_load_subgroup_invocation(b);
  if (IS("simdgroup")) return nir_load_subgroup_id(b);
  if (IS("thread")) return component(b, nir_load_local_invocation_id(b), arguments[0]);
  if (IS("threadgroup")) return component(b, nir_load_workgroup_id(b), arguments[0]);
  if (IS("threads"))
    return nir_imm_int(b, b->shader->info.workgroup_size[nir_src_as_uint(arguments[0])]);
  if (IS("threadgroups"))
    return nir_load_preamble(b, 1, 32, .base = GRID + 2 * nir_src_as_uint(arguments[0]));
  if (IS("shuffle")) return shuffled(b, arguments[0].ssa, arguments[1]);
  if (IS("broadcast")) return nir_read_invocation(b, arguments[0].ssa, arguments[1].ssa);
  if (IS("shuffle_xor")) return shuffled_xor(b, arguments[0].ssa, arguments[1]);
  if (!strncmp(name, "agx_product_", 12)) return product(b, name + 12, arguments);
  if (IS("exp2")) return nir_fexp2(b, arguments[0].ssa);
  if (IS("log2")) return nir_flog2(b, arguments[0].ssa);
  if (IS("sin")) return nir_fsin(b, arguments[0].ssa);
  if (IS("cos")) return nir_fcos(b, arguments[0].ssa);
  if (IS("sqrt")) return nir_fsqrt(b, arguments[0].ssa);
  fprintf(stderr, "no instruction for %s\n", name);
  exit(1);
#undef IS
}

static void replace(nir_builder* b, nir_call_instr* call) {
  const char* name = call->callee->name;
  b->cursor = nir_before_instr(&call->instr);
  if (!strcmp(name, "agx_barrier")) {
    nir_barrier(b, SCOPE_WORKGROUP, SCOPE_WORKGROUP, NIR_MEMORY_ACQ_REL, nir_var_mem_shared);
  } else if (!strcmp(name, "agx_simdgroup_barrier")) {
    nir_barrier(b, SCOPE_SUBGROUP, SCOPE_SUBGROUP, NIR_MEMORY_ACQ_REL, nir_var_mem_shared);
  } else {
    nir_def* value = value_of(b, name, call->params + 1);
    nir_store_deref(b, nir_src_as_deref(call->params[0]), value, ~0);
  }
  nir_instr_remove(&call->instr);
}

void lens_lower_calls(nir_shader* nir) {
  nir_foreach_function_impl(impl, nir) {
    nir_builder b = nir_builder_create(impl);
    nir_foreach_block(block, impl) {
      nir_foreach_instr_safe(instr, block) {
        if (instr->type != nir_instr_type_call) continue;
        nir_call_instr* call = nir_instr_as_call(instr);
        nir_function* callee = call->callee;
        if (!callee->impl && callee->name && !strncmp(callee->name, "agx_", 4)) replace(&b, call);
      }
    }
    nir_metadata_preserve(impl, nir_metadata_none);
  }
}
