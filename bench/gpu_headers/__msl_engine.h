// What a SIMD group does on a GPU: instructions, where the simulator's header of this name calls
// its engine. `__msl_lane` is Apple's lane, which decides what a lane holds of an 8x8 matrix.
#pragma once
#include <__msl_types.h>

#define MSL_LOOKUP static METAL_FUNC __attribute__((unused))
#define MSL_ENTRY MSL_LOOKUP

// Atomic operations of the shim tell the engine of checked builds, which these never are.
extern "C" const __msl_engine* __msl_table;

#if defined(__AMDGCN__)

// The back end is asked for registers only, so the lanes of a matrix need not be where AMD has
// them.
METAL_FUNC uint __gpu_lane() { return __builtin_amdgcn_mbcnt_lo(~0u, 0u); }
METAL_FUNC uint __msl_apple_lane(uint lane) { return lane; }
METAL_FUNC uint __gpu_lane_of(uint apple_lane) { return apple_lane; }
METAL_FUNC uint __gpu_shuffle(uint word, uint lane) {
  return (uint)__builtin_amdgcn_ds_bpermute((int)(lane << 2), (int)word);
}
METAL_FUNC uint __gpu_shuffle_xor(uint word, uint mask) {
  return __gpu_shuffle(word, __gpu_lane() ^ mask);
}
METAL_FUNC uint __gpu_ballot(bool vote) { return __builtin_amdgcn_ballot_w32(vote); }
// One register of a SIMD group, as Apple's compiler knows of the group's index.
METAL_FUNC uint __gpu_uniform(uint word) { return __builtin_amdgcn_readfirstlane(word); }
METAL_FUNC void __msl_threadgroup_barrier(uint) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
METAL_FUNC void __msl_simdgroup_barrier(uint) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
#define __GPU_BUILT_IN(what, i) (uint) __builtin_amdgcn_##what##_##i()
#define __GPU_THREAD(i) __GPU_BUILT_IN(workitem_id, i)
#define __GPU_THREADGROUP(i) __GPU_BUILT_IN(workgroup_id, i)
#define __GPU_THREADS(i) __GPU_BUILT_IN(workgroup_size, i)
#define __GPU_GRID(i) __GPU_BUILT_IN(grid_size, i)
#define __GPU_THREADGROUPS(i) (__GPU_GRID(i) / __GPU_THREADS(i))

#elif defined(__NVPTX__)

// Physical lane l plays the lane of Apple's whose part of a matrix `mma.sync` wants of l.
// MSL_LANES_AS_THEY_ARE: for threadgroups whose size is no multiple of 32, without matrices.
METAL_FUNC uint __gpu_lane() { return __nvvm_read_ptx_sreg_laneid(); }
#ifdef MSL_LANES_AS_THEY_ARE
METAL_FUNC uint __msl_apple_lane(uint lane) { return lane; }
METAL_FUNC uint __gpu_lane_of(uint apple_lane) { return apple_lane; }
#else
METAL_FUNC uint __msl_apple_lane(uint l) {
  return (l & 16) | ((l & 2) << 2) | ((l & 8) >> 1) | ((l & 4) >> 1) | (l & 1);
}
METAL_FUNC uint __gpu_lane_of(uint l) {
  return (l & 16) | ((l & 4) << 1) | ((l & 2) << 1) | ((l & 8) >> 2) | (l & 1);
}
#endif
METAL_FUNC uint __gpu_shuffle(uint word, uint lane) {
  return (uint)__nvvm_shfl_sync_idx_i32(~0u, (int)word, (int)lane, 31);
}
METAL_FUNC uint __gpu_shuffle_xor(uint word, uint mask) {
  return (uint)__nvvm_shfl_sync_bfly_i32(~0u, (int)word, (int)mask, 31);
}
METAL_FUNC uint __gpu_uniform(uint word) { return word; }
METAL_FUNC uint __gpu_ballot(bool vote) { return (uint)__nvvm_vote_ballot_sync(~0u, vote); }
METAL_FUNC void __msl_threadgroup_barrier(uint) { __nvvm_bar_sync(0); }
METAL_FUNC void __msl_simdgroup_barrier(uint) { __nvvm_bar_warp_sync(~0u); }
#define __GPU_BUILT_IN(what, i) (uint) __nvvm_read_ptx_sreg_##what##_##i()
#define __GPU_THREAD(i) __GPU_BUILT_IN(tid, i)
#define __GPU_THREADGROUP(i) __GPU_BUILT_IN(ctaid, i)
#define __GPU_THREADS(i) __GPU_BUILT_IN(ntid, i)
#define __GPU_THREADGROUPS(i) __GPU_BUILT_IN(nctaid, i)
#define __GPU_GRID(i) (__GPU_THREADGROUPS(i) * __GPU_THREADS(i))

#else
#error "the target is neither AMDGPU nor NVPTX"
#endif

METAL_FUNC uint __msl_lane() { return __msl_apple_lane(__gpu_lane()); }
METAL_FUNC uint __msl_pair_index() {
  uint quad = __msl_lane() / 4, row = (quad & 4) + __msl_lane() / 2 % 4;
  return row * 4 + (quad & 2) + __msl_lane() % 2;
}

// The running thread, as an entry gives it to the shim's launch header. A threadgroup's threads are
// counted by SIMD groups, in each of which they are in the order of Apple's lanes.
METAL_FUNC void __gpu_place(__msl_launch& launch, __msl_thread& place) {
  const uint threads[3] = {__GPU_THREADS(x), __GPU_THREADS(y), __GPU_THREADS(z)};
  const uint groups[3] = {__GPU_THREADGROUPS(x), __GPU_THREADGROUPS(y), __GPU_THREADGROUPS(z)};
  const uint group[3] = {__GPU_THREADGROUP(x), __GPU_THREADGROUP(y), __GPU_THREADGROUP(z)};
  for (int i = 0; i < 3; ++i) {
    launch.position[i] = group[i];
    launch.threads[i] = launch.dispatch_threads[i] = threads[i];
    launch.threadgroups[i] = groups[i];
    launch.grid[i] = groups[i] * threads[i];
  }
  launch.simdgroups = (threads[0] * threads[1] * threads[2] + 31) / 32;
  const uint physical =
      __GPU_THREAD(x) + threads[0] * (__GPU_THREAD(y) + threads[1] * __GPU_THREAD(z));
  place.lane = __msl_lane();
  place.simdgroup = __gpu_uniform(physical / 32);
  place.index = place.simdgroup * 32 + place.lane;
  place.position[0] = place.index % threads[0];
  place.position[1] = place.index / threads[0] % threads[1];
  place.position[2] = place.index / (threads[0] * threads[1]);
  place.pair = __msl_pair_index();
}
