/* Reorders each block so that it needs fewer registers: an instruction that frees more registers
 * than it takes moves forward as far as possible. Mesa's scheduler chooses greedily from the end of
 * a block, and gains little in long blocks of matrix products. */

#include "lens.h"
#include "util/u_dynarray.h"

struct node {
  agx_instr* instruction;
  struct util_dynarray users; /* indices of the nodes that wait for this one */
  unsigned waits;             /* nodes that this one waits for */
  bool done;
};

struct schedule {
  agx_context* ctx;
  agx_block* block;
  struct node* nodes;
  unsigned count;
  unsigned* uses; /* of each value, by nodes that are not done */
};

static bool is_first_mention(const agx_instr* instruction, unsigned s) {
  for (unsigned i = 0; i < s; i++) {
    if (agx_is_equiv(instruction->src[i], instruction->src[s])) return false;
  }
  return true;
}

static void wait_for(struct schedule* s, int earlier, unsigned later) {
  if (earlier < 0) return;
  util_dynarray_append(&s->nodes[earlier].users, unsigned, later);
  s->nodes[later].waits++;
}

/* A use waits for its definition. Accesses of memory, barriers and preloads keep their order. */
static void find_dependencies(struct schedule* s) {
  int* writer = malloc(s->ctx->alloc * sizeof(int));
  int memory = -1, preload = -1;
  memset(writer, -1, s->ctx->alloc * sizeof(int));
  for (unsigned i = 0; i < s->count; i++) {
    agx_instr* instruction = s->nodes[i].instruction;
    agx_foreach_ssa_src(instruction, src) {
      if (instruction->op == AGX_OPCODE_PHI || !is_first_mention(instruction, src)) continue;
      wait_for(s, writer[instruction->src[src].value], i);
      s->uses[instruction->src[src].value]++;
    }
    agx_foreach_ssa_dest(instruction, d) { writer[instruction->dest[d].value] = i; }
    wait_for(s, preload, i);
    switch (agx_opcodes_info[instruction->op].schedule_class) {
      case AGX_SCHEDULE_CLASS_LOAD:
      case AGX_SCHEDULE_CLASS_STORE:
      case AGX_SCHEDULE_CLASS_ATOMIC:
      case AGX_SCHEDULE_CLASS_BARRIER:
        wait_for(s, memory, i);
        memory = i;
        break;
      case AGX_SCHEDULE_CLASS_PRELOAD:
        preload = i;
        break;
      default:
        break;
    }
  }
  free(writer);
}

/* Registers that the instruction takes, minus those that it frees. */
static int registers_taken(struct schedule* s, const agx_instr* instruction) {
  const BITSET_WORD* live_out = s->block->live_out;
  int taken = 0;
  agx_foreach_ssa_dest(instruction, d) {
    unsigned value = instruction->dest[d].value;
    if (s->uses[value] || BITSET_TEST(live_out, value))
      taken += agx_index_size_16(instruction->dest[d]);
  }
  agx_foreach_ssa_src(instruction, src) {
    unsigned value = instruction->src[src].value;
    bool is_last = s->uses[value] == 1 && !BITSET_TEST(live_out, value);
    if (is_last && is_first_mention(instruction, src))
      taken -= agx_index_size_16(instruction->src[src]);
  }
  return taken;
}

/* The first node that is ready, or a ready one that frees more registers. */
static unsigned next_of(struct schedule* s, unsigned first) {
  agx_instr* leading = s->nodes[first].instruction;
  if (leading->op == AGX_OPCODE_PHI || leading->op == AGX_OPCODE_PRELOAD) return first;
  unsigned best = s->count;
  int best_taken = 0;
  for (unsigned i = first; i < s->count; i++) {
    if (s->nodes[i].done || s->nodes[i].waits) continue;
    int taken = registers_taken(s, s->nodes[i].instruction);
    if (best == s->count || taken < best_taken) {
      best = i;
      best_taken = MIN2(taken, 0);
    }
  }
  return best;
}

static void finish(struct schedule* s, struct node* node) {
  node->done = true;
  agx_foreach_ssa_src(node->instruction, src) {
    if (node->instruction->op != AGX_OPCODE_PHI && is_first_mention(node->instruction, src))
      s->uses[node->instruction->src[src].value]--;
  }
  util_dynarray_foreach(&node->users, unsigned, user) { s->nodes[*user].waits--; }
}

/* The maximum of live registers in an order, up to a constant. */
static int pressure(struct schedule* s, agx_instr* const* order) {
  BITSET_WORD* live = malloc(BITSET_WORDS(s->ctx->alloc) * sizeof(BITSET_WORD));
  memcpy(live, s->block->live_out, BITSET_WORDS(s->ctx->alloc) * sizeof(BITSET_WORD));
  agx_foreach_instr_in_block_rev(s->block, instruction) {
    if (!instr_after_logical_end(instruction)) break;
    agx_liveness_ins_update(live, instruction);
  }
  int taken = 0, most = 0;
  for (unsigned i = s->count; i-- > 0;) {
    agx_foreach_ssa_dest(order[i], d) {
      if (BITSET_TEST(live, order[i]->dest[d].value)) taken -= agx_index_size_16(order[i]->dest[d]);
    }
    agx_foreach_ssa_src(order[i], src) {
      if (is_first_mention(order[i], src) && !BITSET_TEST(live, order[i]->src[src].value))
        taken += agx_index_size_16(order[i]->src[src]);
    }
    agx_liveness_ins_update(live, order[i]);
    most = MAX2(most, taken);
  }
  free(live);
  return most;
}

static void schedule_block(struct schedule* s) {
  agx_instr** before = malloc(s->count * sizeof(*before));
  agx_instr** order = malloc(s->count * sizeof(*order));
  for (unsigned i = 0; i < s->count; i++) before[i] = s->nodes[i].instruction;
  for (unsigned done = 0, first = 0; done < s->count; done++) {
    while (s->nodes[first].done) first++;
    struct node* next = &s->nodes[next_of(s, first)];
    finish(s, next);
    order[done] = next->instruction;
  }
  if (pressure(s, order) < pressure(s, before)) {
    for (unsigned i = s->count; i-- > 0;) {
      agx_remove_instruction(order[i]);
      list_add(&order[i]->link, &s->block->instructions);
    }
  }
  free(before);
  free(order);
}

void lens_schedule(agx_context* ctx) {
  agx_compute_liveness(ctx);
  agx_foreach_block(ctx, block) {
    struct schedule s = {.ctx = ctx, .block = block};
    agx_foreach_instr_in_block(block, instruction) {
      if (instr_after_logical_end(instruction)) break;
      s.count++;
    }
    s.nodes = calloc(s.count, sizeof(*s.nodes));
    s.uses = calloc(ctx->alloc, sizeof(*s.uses));
    unsigned i = 0;
    agx_foreach_instr_in_block(block, instruction) {
      if (i == s.count) break;
      s.nodes[i].instruction = instruction;
      util_dynarray_init(&s.nodes[i++].users, NULL);
    }
    find_dependencies(&s);
    schedule_block(&s);
    for (i = 0; i < s.count; i++) util_dynarray_fini(&s.nodes[i].users);
    free(s.nodes);
    free(s.uses);
  }
  agx_foreach_instr_global(ctx, instruction) {
    agx_foreach_ssa_src(instruction, src) { instruction->src[src].kill = false; }
  }
}
