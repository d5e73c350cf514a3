/* Recomputes values before each use if that is cheaper than keeping them in registers: a pair of
 * uniform registers, a word that is extended to 64 bits, and sums of one value with many constants,
 * such as the columns of a lane. */

#include "compiler/nir/nir_builder.h"
#include "lens.h"

/* Sums with constants are recomputed if one value has at least this many. */
#define FEWEST_COMPUTED_AGAIN 4

/* The result of instr if it is a pair of uniform registers or an extended word; else NULL. */
static nir_def* recomputable(nir_instr* instr) {
  if (instr->type == nir_instr_type_intrinsic) {
    nir_intrinsic_instr* intrinsic = nir_instr_as_intrinsic(instr);
    bool is_pair = intrinsic->def.bit_size == 64;
    return intrinsic->intrinsic == nir_intrinsic_load_preamble && is_pair ? &intrinsic->def : NULL;
  }
  if (instr->type != nir_instr_type_alu) return NULL;
  nir_alu_instr* alu = nir_instr_as_alu(instr);
  bool extends = alu->op == nir_op_pack_64_2x32_split && nir_src_is_const(alu->src[1].src);
  return extends ? &alu->def : NULL;
}

static nir_block* block_of(nir_src* use) {
  nir_instr* user = nir_src_parent_instr(use);
  return user->type == nir_instr_type_phi ? exec_node_data(nir_phi_src, use, src)->pred
                                          : user->block;
}

static bool is_used_here_only(nir_def* def) {
  if (!list_is_singular(&def->uses)) return false;
  nir_foreach_use(use, def) { return block_of(use) == def->parent_instr->block; }
  return false;
}

static void move_to_uses(nir_shader* nir, nir_def* def) {
  nir_foreach_use_safe(use, def) {
    nir_instr* user = nir_src_parent_instr(use);
    nir_instr* copy = nir_instr_clone(nir, def->parent_instr);
    if (user->type == nir_instr_type_phi) {
      nir_instr_insert_after_block(block_of(use), copy);
    } else {
      nir_instr_insert_before(user, copy);
    }
    nir_src_rewrite(use, nir_instr_def(copy));
  }
  nir_instr_remove(def->parent_instr);
}

/* The source of a sum with a constant or of an extension; NULL for other instructions. */
static nir_alu_src* source_of_step(nir_def* def) {
  if (def->parent_instr->type != nir_instr_type_alu || def->num_components > 1) return NULL;
  nir_alu_instr* alu = nir_instr_as_alu(def->parent_instr);
  switch (alu->op) {
    case nir_op_u2u32:
    case nir_op_i2i32:
      return &alu->src[0];
    case nir_op_iadd:
    case nir_op_pack_64_2x32_split:
      return nir_src_is_const(alu->src[1].src) ? &alu->src[0] : NULL;
    default:
      return NULL;
  }
}

static nir_def* root_of(nir_def* def) {
  nir_alu_src* source = source_of_step(def);
  return source ? root_of(source->src.ssa) : def;
}

static bool is_used_elsewhere_only(nir_def* def) {
  nir_foreach_use_including_if(use, def) {
    if (nir_src_is_if(use) || block_of(use) == def->parent_instr->block) return false;
  }
  return !list_is_empty(&def->uses);
}

static nir_def* steps_again(nir_shader* nir, nir_def* def, nir_cursor cursor) {
  nir_alu_src* source = source_of_step(def);
  if (!source) return def;
  nir_def* before = steps_again(nir, source->src.ssa, cursor);
  nir_instr* copy = nir_instr_clone(nir, def->parent_instr);
  nir_instr_insert(cursor, copy);
  nir_src_rewrite(&nir_instr_as_alu(copy)->src[0].src, before);
  return nir_instr_def(copy);
}

static void take_steps_at_uses(nir_shader* nir, nir_function_impl* impl) {
  struct hash_table* steps = _mesa_pointer_hash_table_create(NULL);
  nir_foreach_block(block, impl) {
    nir_foreach_instr(instr, block) {
      nir_def* def = nir_instr_def(instr);
      if (!def || !source_of_step(def) || !is_used_elsewhere_only(def)) continue;
      nir_def* root = root_of(def);
      struct hash_entry* entry = _mesa_hash_table_search(steps, root);
      uintptr_t before = entry ? (uintptr_t)entry->data : 0;
      _mesa_hash_table_insert(steps, root, (void*)(before + 1));
    }
  }
  nir_foreach_block(block, impl) {
    nir_foreach_instr_safe(instr, block) {
      nir_def* def = nir_instr_def(instr);
      if (!def || !source_of_step(def) || !is_used_elsewhere_only(def)) continue;
      struct hash_entry* entry = _mesa_hash_table_search(steps, root_of(def));
      if (!entry || (uintptr_t)entry->data < FEWEST_COMPUTED_AGAIN) continue;
      nir_foreach_use_safe(use, def) {
        nir_instr* user = nir_src_parent_instr(use);
        nir_cursor cursor = user->type == nir_instr_type_phi
                                ? nir_after_block_before_jump(block_of(use))
                                : nir_before_instr(user);
        nir_src_rewrite(use, steps_again(nir, def, cursor));
      }
    }
  }
  _mesa_hash_table_destroy(steps, NULL);
}

void lens_compute_at_uses(nir_shader* nir) {
  nir_foreach_function_with_impl(function, impl, nir) {
    nir_foreach_block(block, impl) {
      nir_foreach_instr_safe(instr, block) {
        nir_def* def = recomputable(instr);
        if (def && !is_used_here_only(def)) move_to_uses(nir, def);
      }
    }
    take_steps_at_uses(nir, impl);
    nir_metadata_preserve(impl, nir_metadata_control_flow);
  }
  nir_opt_dce(nir);
  nir_divergence_analysis(nir);
}
