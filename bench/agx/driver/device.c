/* Addresses in device memory. The GPU adds to a 64-bit base either a constant or an index, so loads
 * of one row at constant distances share a base that is computed once. LLVM splits constants off
 * addresses only for GPUs whose back ends ask for it. */

#include "compiler/nir/nir_builder.h"
#include "lens.h"

/* Fewer accesses than this have an index each: a sum of 64 bits costs more than one of 32. */
#define FEWEST_THAT_SHARE 3

/* A sum without its constant. Sums are counted first, with b == NULL, and built afterwards. We
 * assume that sums of 16 and 32 bits do not wrap. */
struct sum {
  nir_def* rest; /* NULL: the sum is only a constant, or sums are being counted */
  uint64_t rest_hash;
  int64_t constant;
};

static struct sum leaf(nir_builder* b, nir_scalar x) {
  struct sum sum = {.rest_hash = ((uintptr_t)x.def + x.comp + 1) * 0x9e3779b97f4a7c15ull};
  if (b) {
    b->cursor = nir_after_instr_and_phis(x.def->parent_instr);
    sum.rest = nir_channel(b, x.def, x.comp);
  }
  return sum;
}

static struct sum split(nir_builder* b, nir_scalar x, unsigned depth) {
  x = nir_scalar_chase_movs(x);
  if (nir_scalar_is_const(x)) return (struct sum){.constant = nir_scalar_as_int(x)};
  if (!nir_scalar_is_alu(x) || depth > 12) return leaf(b, x);
  nir_op op = nir_scalar_alu_op(x);
  unsigned bits = x.def->bit_size;
  if (op == nir_op_iadd) {
    struct sum left = split(b, nir_scalar_chase_alu_src(x, 0), depth + 1);
    struct sum right = split(b, nir_scalar_chase_alu_src(x, 1), depth + 1);
    if (!left.constant && !right.constant) return leaf(b, x);
    struct sum sum = {.rest_hash = left.rest_hash + right.rest_hash,
                      .constant = left.constant + right.constant};
    if (b) {
      b->cursor = nir_after_instr(x.def->parent_instr);
      sum.rest = !left.rest    ? right.rest
                 : !right.rest ? left.rest
                               : nir_iadd(b, left.rest, right.rest);
    }
    return sum;
  }
  if (op == nir_op_ishl || op == nir_op_imul || op == nir_op_amul) {
    nir_scalar by = nir_scalar_chase_alu_src(x, 1);
    if (!nir_scalar_is_const(by)) return leaf(b, x);
    int64_t times = nir_scalar_as_int(by);
    if (op == nir_op_ishl) times = 1ll << (times & 63);
    struct sum sum = split(b, nir_scalar_chase_alu_src(x, 0), depth + 1);
    if (!sum.constant) return leaf(b, x);
    sum.constant *= times;
    sum.rest_hash *= times;
    if (sum.rest) {
      b->cursor = nir_after_instr(x.def->parent_instr);
      sum.rest = nir_imul_imm(b, sum.rest, times);
    }
    return sum;
  }
  if (op == nir_op_u2u64 || op == nir_op_i2i64 || op == nir_op_u2u32 || op == nir_op_i2i32) {
    nir_scalar from = nir_scalar_chase_alu_src(x, 0);
    if (from.def->bit_size >= bits) return leaf(b, x);
    struct sum sum = split(b, from, depth + 1);
    if (!sum.constant) return leaf(b, x);
    sum.rest_hash = sum.rest_hash * 31 + (op == nir_op_i2i64 || op == nir_op_i2i32);
    if (sum.rest) {
      b->cursor = nir_after_instr(x.def->parent_instr);
      bool is_signed = op == nir_op_i2i64 || op == nir_op_i2i32;
      sum.rest = is_signed ? nir_i2iN(b, sum.rest, bits) : nir_u2uN(b, sum.rest, bits);
    }
    return sum;
  }
  return leaf(b, x);
}

static nir_src* address_of(nir_instr* instr) {
  if (instr->type != nir_instr_type_intrinsic) return NULL;
  nir_intrinsic_instr* access = nir_instr_as_intrinsic(instr);
  switch (access->intrinsic) {
    case nir_intrinsic_load_global:
    case nir_intrinsic_load_global_constant:
      return &access->src[0];
    case nir_intrinsic_store_global:
      return &access->src[1];
    default:
      return NULL;
  }
}

void lens_fold_device_constants(nir_shader* nir) {
  nir_foreach_function_impl(impl, nir) {
    nir_builder b = nir_builder_create(impl);
    nir_foreach_block(block, impl) {
      struct hash_table_u64* shared = _mesa_hash_table_u64_create(NULL);
      nir_foreach_instr(instr, block) {
        nir_src* address = address_of(instr);
        if (!address) continue;
        struct sum sum = split(NULL, nir_get_scalar(address->ssa, 0), 0);
        uintptr_t before = (uintptr_t)_mesa_hash_table_u64_search(shared, sum.rest_hash | 1);
        _mesa_hash_table_u64_insert(shared, sum.rest_hash | 1, (void*)(before + 1));
      }
      nir_foreach_instr_safe(instr, block) {
        nir_src* address = address_of(instr);
        if (!address) continue;
        nir_scalar whole = nir_get_scalar(address->ssa, 0);
        struct sum sum = split(NULL, whole, 0);
        uintptr_t count = (uintptr_t)_mesa_hash_table_u64_search(shared, sum.rest_hash | 1);
        if (!sum.constant || count < FEWEST_THAT_SHARE) continue;
        sum = split(&b, whole, 0);
        if (!sum.rest) continue;
        b.cursor = nir_before_instr(instr);
        nir_src_rewrite(address, nir_iadd_imm(&b, sum.rest, sum.constant));
      }
      _mesa_hash_table_u64_destroy(shared);
    }
    nir_metadata_preserve(impl, nir_metadata_control_flow);
  }
}
