/* Addresses in threadgroup memory. SPIR-V has 64-bit pointers; the GPU adds a constant of 16 bits
 * to an index of 16 bits in the load itself. */

#include "compiler/nir/nir_builder.h"
#include "lens.h"

#define LARGEST_CONSTANT 0x7fff

static nir_def* operand(nir_builder* b, nir_scalar x) { return nir_channel(b, x.def, x.comp); }

/* The low 32 bits of x, computed in 32 bits. Afterwards the cursor is just after x, so that code
 * built next may use the result. */
static nir_def* narrow(nir_builder* b, nir_scalar x, unsigned depth) {
  nir_instr* instr = x.def->parent_instr;
  if (nir_scalar_is_const(x)) {
    b->cursor = nir_after_instr(instr);
    return nir_imm_int(b, nir_scalar_as_uint(x));
  }
  if (x.def->bit_size == 64 && nir_scalar_is_alu(x) && depth < 16) {
    nir_op op = nir_scalar_alu_op(x);
    nir_scalar first = nir_scalar_chase_alu_src(x, 0);
    switch (op) {
      case nir_op_u2u64:
      case nir_op_i2i64: {
        b->cursor = nir_after_instr(instr);
        nir_def* word = operand(b, first);
        return op == nir_op_u2u64 ? nir_u2uN(b, word, 32) : nir_i2iN(b, word, 32);
      }
      case nir_op_ishl: {
        nir_def* left = narrow(b, first, depth + 1);
        b->cursor = nir_after_instr(instr);
        return nir_ishl(b, left, operand(b, nir_scalar_chase_alu_src(x, 1)));
      }
      case nir_op_iadd:
      case nir_op_isub:
      case nir_op_imul:
      case nir_op_amul:
      case nir_op_iand:
      case nir_op_ior:
      case nir_op_ixor: {
        nir_def* left = narrow(b, first, depth + 1);
        nir_def* right = narrow(b, nir_scalar_chase_alu_src(x, 1), depth + 1);
        b->cursor = nir_after_instr(instr);
        return nir_build_alu2(b, op, left, right);
      }
      case nir_op_bcsel: {
        nir_def* left = narrow(b, nir_scalar_chase_alu_src(x, 1), depth + 1);
        nir_def* right = narrow(b, nir_scalar_chase_alu_src(x, 2), depth + 1);
        b->cursor = nir_after_instr(instr);
        return nir_bcsel(b, operand(b, first), left, right);
      }
      default:
        break;
    }
  }
  b->cursor = nir_after_instr_and_phis(instr);
  return nir_u2u32(b, operand(b, x));
}

static bool narrow_conversion(nir_builder* b, nir_alu_instr* alu, void* unused) {
  bool is_low_word = alu->op == nir_op_u2u32 || alu->op == nir_op_i2i32 ||
                     alu->op == nir_op_unpack_64_2x32_split_x;
  if (!is_low_word || alu->src[0].src.ssa->bit_size != 64 || alu->def.num_components > 1)
    return false;
  nir_scalar wide = nir_scalar_chase_alu_src(nir_get_scalar(&alu->def, 0), 0);
  nir_def_replace(&alu->def, narrow(b, wide, 0));
  return true;
}

void lens_narrow_threadgroup_addresses(nir_shader* nir) {
  nir_shader_alu_pass(nir, narrow_conversion, nir_metadata_control_flow, NULL);
}

/* x without its constant part, which is added to *constant. NULL: x is only a constant. */
static nir_def* without_constant(nir_builder* b, nir_scalar x, uint32_t* constant, unsigned depth) {
  x = nir_scalar_chase_movs(x);
  nir_instr* instr = x.def->parent_instr;
  if (nir_scalar_is_const(x)) {
    *constant += nir_scalar_as_uint(x);
    return NULL;
  }
  if (nir_scalar_is_alu(x) && depth < 12) {
    nir_op op = nir_scalar_alu_op(x);
    nir_scalar first = nir_scalar_chase_alu_src(x, 0);
    uint32_t found = 0;
    if (op == nir_op_iadd) {
      nir_def* left = without_constant(b, first, &found, depth + 1);
      nir_def* right = without_constant(b, nir_scalar_chase_alu_src(x, 1), &found, depth + 1);
      if (found) {
        *constant += found;
        b->cursor = nir_after_instr(instr);
        return !left ? right : !right ? left : nir_iadd(b, left, right);
      }
    } else if (op == nir_op_ishl || op == nir_op_imul || op == nir_op_amul) {
      nir_scalar by = nir_scalar_chase_alu_src(x, 1);
      if (nir_scalar_is_const(by)) {
        uint32_t n = nir_scalar_as_uint(by), times = op == nir_op_ishl ? 1u << (n & 31) : n;
        nir_def* left = without_constant(b, first, &found, depth + 1);
        if (found) {
          *constant += found * times;
          b->cursor = nir_after_instr(instr);
          return left ? nir_imul_imm(b, left, times) : NULL;
        }
      }
    }
  }
  b->cursor = nir_after_instr_and_phis(instr);
  return operand(b, x);
}

static bool fold_constant(nir_builder* b, nir_intrinsic_instr* access, void* unused) {
  if (access->intrinsic != nir_intrinsic_load_shared &&
      access->intrinsic != nir_intrinsic_store_shared)
    return false;
  nir_src* offset = nir_get_io_offset_src(access);
  uint32_t before = nir_intrinsic_base(access), constant = before;
  nir_def* rest = without_constant(b, nir_get_scalar(offset->ssa, 0), &constant, 0);
  if (constant == before || constant > LARGEST_CONSTANT) return false;
  b->cursor = nir_before_instr(&access->instr);
  nir_src_rewrite(offset, rest ? rest : nir_imm_int(b, 0));
  nir_intrinsic_set_base(access, constant);
  return true;
}

void lens_fold_threadgroup_constants(nir_shader* nir) {
  nir_shader_intrinsics_pass(nir, fold_constant, nir_metadata_control_flow, NULL);
}
