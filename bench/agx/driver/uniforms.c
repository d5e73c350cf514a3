/* Values that one instruction makes of uniform registers or of a word: made anew before each use,
 * so that none of them stays in the registers of all lanes. */

#include "compiler/nir/nir_builder.h"
#include "lens.h"

/* A pair of uniform registers, or a word that is extended to 64 bits. */
static nir_def* made_by_one(nir_instr* instr) {
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

void lens_move_uniforms_to_uses(nir_shader* nir) {
  nir_foreach_function_with_impl(function, impl, nir) {
    nir_foreach_block(block, impl) {
      nir_foreach_instr_safe(instr, block) {
        nir_def* def = made_by_one(instr);
        if (def && !is_used_here_only(def)) move_to_uses(nir, def);
      }
    }
    nir_metadata_preserve(impl, nir_metadata_control_flow);
  }
  nir_divergence_analysis(nir);
}
