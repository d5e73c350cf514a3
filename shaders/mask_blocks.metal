// Lists the blocks of a bool mask that are not entirely masked out. Attention skips other blocks.
//
// A threadgroup makes one list, 32 blocks at a time. Its SIMD groups read one block each, and the
// first SIMD group then appends the blocks that are not masked out, in ascending order. Each
// element of the mask is read once.
#include "params/mask_blocks.h"
#include "tile.h"

// The host defines WORD, the type of a lane's load: uint2 (8 elements) or uchar (1 element).
constant constexpr int THREADS = MASK_BLOCKS_SIMDGROUPS * SIMD_LANES;
constant constexpr int WORD_ELEMENTS = sizeof(WORD);

// Which elements of a block a lane has read; after merge_lanes, which its SIMD group has read.
struct BlockState {
  bool shows;  // true if any element is not masked out
  bool hides;  // true if any element is masked out

  METAL_FUNC void add(uchar element) thread {
    shows = shows || element != 0;
    hides = hides || element == 0;
  }

  METAL_FUNC void add(uint four) thread {
    shows = shows || four != 0;
    // The result is not 0 if and only if any of the four bytes is 0.
    hides = hides || ((four - 0x01010101) & ~four & 0x80808080) != 0;
  }

  METAL_FUNC void add(uint2 eight) thread {
    add(eight.x);
    add(eight.y);
  }

  METAL_FUNC void merge_lanes() thread {
    shows = simd_max(shows ? 1u : 0u) != 0;
    hides = simd_max(hides ? 1u : 0u) != 0;
  }
};

// The number of elements along a side of the block at `first`; 1 if the mask broadcasts along it.
METAL_FUNC int side(int first, int block, int length, int64_t stride) {
  return stride == 0 ? 1 : min(block, length - first);
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void mask_blocks(
    const device uchar* mask [[buffer(MASK_BLOCKS_MASK)]],
    device int* counts [[buffer(MASK_BLOCKS_COUNTS)]],
    device int* entries [[buffer(MASK_BLOCKS_ENTRIES)]],
    constant MaskBlocksParams& params [[buffer(MASK_BLOCKS_PARAMS)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint3 threadgroups [[threadgroups_per_grid]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup uint states[SIMD_LANES];  // of blocks: 0 hidden, 1 shown entirely, 2 shown in part

  const int64_t row = int64_t(threadgroup_position.z) * threadgroups.y + threadgroup_position.y;
  const int64_t list = row * threadgroups.x + threadgroup_position.x;
  device int* list_entries = entries + list * params.blocks;
  const device uchar* head_mask = mask + threadgroup_position.z * params.batch_stride +
                                  threadgroup_position.y * params.head_stride;

  int count = 0;
  for (int first_block = 0; first_block < params.blocks; first_block += SIMD_LANES) {
    const int last = min(SIMD_LANES, params.blocks - first_block);
    for (int i = simdgroup; i < last; i += MASK_BLOCKS_SIMDGROUPS) {
      const int block = first_block + i;
      const int owned = threadgroup_position.x;
      const int inner = (params.along_inner ? block : owned) * params.inner_block;
      const int outer = (params.along_inner ? owned : block) * params.outer_block;
      const int columns =
          side(inner, params.inner_block, params.inner_length, params.inner_stride) / WORD_ELEMENTS;
      const int rows = side(outer, params.outer_block, params.outer_length, params.outer_stride);
      const device uchar* block_mask =
          head_mask + outer * params.outer_stride + inner * params.inner_stride;
      BlockState state = {false, false};
      for (int word = lane; word < rows * columns; word += SIMD_LANES) {
        const device uchar* first = block_mask + word / columns * params.outer_stride +
                                    word % columns * WORD_ELEMENTS * params.inner_stride;
        state.add(*reinterpret_cast<const device WORD*>(first));
      }
      state.merge_lanes();
      if (lane == 0) { states[i] = state.shows ? (state.hides ? 2 : 1) : 0; }
    }
    // Wait until all states are stored.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
      const uint state = lane < last ? states[lane] : 0;
      const uint listed = state != 0 ? 1 : 0;
      const int place = count + int(simd_prefix_exclusive_sum(listed));
      if (listed != 0) { list_entries[place] = mask_block_entry(first_block + lane, state == 2); }
      count += int(simd_sum(listed));
    }
    // Wait until all states have been read.
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (simdgroup == 0 && lane == 0) { counts[list] = count; }
}
