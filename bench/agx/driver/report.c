/* The output for bench/agx/listing.py: registers, and the instructions of each block. LENS_PEAK=1
 * adds the values that are live where most registers are needed, in Mesa's format. */

#include "lens.h"

static unsigned demand_of_function;

void lens_demand(unsigned halves) { demand_of_function = halves; }

static BITSET_WORD *live, *live_at_peak;
static unsigned words, peak;
static agx_instr* at_peak;

static void note(agx_instr* instruction, unsigned demand) {
  if (demand <= peak) return;
  peak = demand;
  at_peak = instruction;
  memcpy(live_at_peak, live, words * sizeof(BITSET_WORD));
}

void lens_enter_block(agx_context* ctx, agx_block* block, unsigned demand) {
  words = BITSET_WORDS(ctx->alloc);
  if (block == agx_start_block(ctx)) {
    live = realloc(live, words * sizeof(BITSET_WORD));
    live_at_peak = realloc(live_at_peak, words * sizeof(BITSET_WORD));
    peak = 0;
  }
  memcpy(live, block->live_in, words * sizeof(BITSET_WORD));
  note(NULL, demand);
}

void lens_execute(agx_instr* instruction, unsigned demand) {
  agx_foreach_ssa_src(instruction, s) {
    if (instruction->src[s].kill) BITSET_CLEAR(live, instruction->src[s].value);
  }
  agx_foreach_ssa_dest(instruction, d) { BITSET_SET(live, instruction->dest[d].value); }
  note(instruction, demand);
}

void lens_print_peak(agx_context* ctx) {
  if (ctx->is_preamble || !getenv("LENS_PEAK")) return;
  printf("live at the peak of %u:\n", peak);
  agx_foreach_instr_global(ctx, instruction) {
    bool is_live = false;
    agx_foreach_ssa_dest(instruction, d) {
      agx_index result = instruction->dest[d];
      is_live |= BITSET_TEST(live_at_peak, result.value) && !result.memory;
    }
    if (is_live) agx_print_instr(instruction, stdout);
    if (instruction == at_peak) printf("   <- here\n");
  }
}

/* Bytes that a load or store moves per lane; 0 for other instructions. */
static unsigned moved(const agx_instr* instruction) {
  switch (instruction->op) {
    case AGX_OPCODE_LOCAL_LOAD:
    case AGX_OPCODE_LOCAL_STORE:
    case AGX_OPCODE_DEVICE_LOAD:
    case AGX_OPCODE_DEVICE_STORE:
    case AGX_OPCODE_STACK_LOAD:
    case AGX_OPCODE_STACK_STORE:
      /* 8, 16 and 32 bits are the first three formats. */
      return util_bitcount(instruction->mask) << instruction->format;
    default:
      return 0;
  }
}

void lens_report(agx_context* ctx) {
  if (ctx->is_preamble) return;
  printf("halves %u\n", demand_of_function);
  printf("threads %u\n", agx_occupancy_for_register_count(ctx->max_reg).max_threads);
  printf("scratch %u\n", ctx->scratch_size_B);
  agx_foreach_block(ctx, block) {
    printf("block %u at %u", block->index, (unsigned)block->offset);
    agx_foreach_successor(block, next) { printf(" %u", next->index); }
    printf("\n");
    agx_foreach_instr_in_block(block, instruction) {
      unsigned bytes = moved(instruction);
      printf(" %s", agx_opcodes_info[instruction->op].name);
      if (bytes) printf(" %u", bytes);
      printf("\n");
    }
  }
}
