// Operations of a SIMD group as instructions of a GPU; the simulator's header of this name calls
// its engine. `__msl_lane` is the index that the lane would have on Apple's GPU: it determines
// which elements of an 8x8 matrix the lane holds.
#pragma once
#include <__msl_types.h>

#define MSL_LOOKUP static METAL_FUNC __attribute__((unused))
#define MSL_ENTRY MSL_LOOKUP

// The shim's atomic operations call the engine in checked builds only; these builds are unchecked.
extern "C" const __msl_engine* __msl_table;
METAL_FUNC void __msl_progress() {}

#if defined(__SPIRV__)

// bench/agx/driver/calls.c compiles these calls to instructions of Apple's GPU.
#define __AGX_PURE __attribute__((const, nothrow))
#define __AGX_GROUP __attribute__((convergent, const, nothrow))
#define __AGX_BARRIER __attribute__((convergent, nothrow))
extern "C" {
__AGX_PURE uint agx_lane();
__AGX_PURE uint agx_simdgroup();
__AGX_PURE uint agx_thread(uint axis);
__AGX_PURE uint agx_threadgroup(uint axis);
__AGX_PURE uint agx_threads(uint axis);
__AGX_PURE uint agx_threadgroups(uint axis);
__AGX_GROUP uint agx_shuffle(uint word, uint lane);
__AGX_GROUP uint agx_broadcast(uint word, uint lane);
__AGX_GROUP uint agx_shuffle_xor(uint word, uint mask);
__AGX_BARRIER void agx_barrier();
__AGX_BARRIER void agx_simdgroup_barrier();
__AGX_GROUP metal::vec<float, 2> agx_product_ff(metal::vec<float, 2>, metal::vec<float, 2>,
                                                metal::vec<float, 2>);
__AGX_GROUP metal::vec<float, 2> agx_product_fh(metal::vec<float, 2>, metal::vec<half, 2>,
                                                metal::vec<float, 2>);
__AGX_GROUP metal::vec<float, 2> agx_product_hh(metal::vec<half, 2>, metal::vec<half, 2>,
                                                metal::vec<float, 2>);
__AGX_GROUP metal::vec<float, 2> agx_product_bb(metal::vec<bfloat, 2>, metal::vec<bfloat, 2>,
                                                metal::vec<float, 2>);
__AGX_GROUP metal::vec<float, 2> agx_product_fb(metal::vec<float, 2>, metal::vec<bfloat, 2>,
                                                metal::vec<float, 2>);
__AGX_PURE float agx_exp2(float);
__AGX_PURE float agx_log2(float);
__AGX_PURE float agx_sin(float);
__AGX_PURE float agx_cos(float);
__AGX_PURE float agx_sqrt(float);
}

METAL_FUNC uint __gpu_lane() { return agx_lane(); }
METAL_FUNC uint __msl_apple_lane(uint lane) { return lane; }
METAL_FUNC uint __gpu_lane_of(uint apple_lane) { return apple_lane; }
METAL_FUNC uint __gpu_shuffle(uint word, uint lane) { return agx_shuffle(word, lane); }
METAL_FUNC uint __gpu_broadcast(uint word, uint lane) { return agx_broadcast(word, lane); }
METAL_FUNC uint __gpu_shuffle_xor(uint word, uint mask) { return agx_shuffle_xor(word, mask); }
METAL_FUNC void __msl_threadgroup_barrier(uint) { agx_barrier(); }
METAL_FUNC void __msl_simdgroup_barrier(uint) { agx_simdgroup_barrier(); }
#define __GPU_AXIS(axis) (#axis[0] - 'x')
#define __GPU_THREAD(i) agx_thread(__GPU_AXIS(i))
#define __GPU_THREADGROUP(i) agx_threadgroup(__GPU_AXIS(i))
#define __GPU_THREADS(i) agx_threads(__GPU_AXIS(i))
#define __GPU_THREADGROUPS(i) agx_threadgroups(__GPU_AXIS(i))
#define __GPU_GRID(i) (__GPU_THREADGROUPS(i) * __GPU_THREADS(i))
#define __GPU_SIMDGROUP(thread) agx_simdgroup()

#elif defined(__NVPTX__)

// Physical lane l acts as the Apple lane that holds the same matrix elements as l in `mma.sync`.
// MSL_LANES_AS_THEY_ARE: lanes keep their index, for kernels without matrices in threadgroups
// whose size is not a multiple of 32.
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
METAL_FUNC uint __gpu_broadcast(uint word, uint lane) { return __gpu_shuffle(word, lane); }
METAL_FUNC uint __gpu_shuffle_xor(uint word, uint mask) {
  return (uint)__nvvm_shfl_sync_bfly_i32(~0u, (int)word, (int)mask, 31);
}
METAL_FUNC void __msl_threadgroup_barrier(uint) { __nvvm_bar_sync(0); }
METAL_FUNC void __msl_simdgroup_barrier(uint) { __nvvm_bar_warp_sync(~0u); }
#define __GPU_BUILT_IN(what, i) (uint) __nvvm_read_ptx_sreg_##what##_##i()
#define __GPU_THREAD(i) __GPU_BUILT_IN(tid, i)
#define __GPU_THREADGROUP(i) __GPU_BUILT_IN(ctaid, i)
#define __GPU_THREADS(i) __GPU_BUILT_IN(ntid, i)
#define __GPU_THREADGROUPS(i) __GPU_BUILT_IN(nctaid, i)
#define __GPU_GRID(i) (__GPU_THREADGROUPS(i) * __GPU_THREADS(i))
#define __GPU_SIMDGROUP(thread) ((thread) / 32)

#else
#error "the target is neither SPIR-V nor NVPTX"
#endif

METAL_FUNC void __msl_matrix_access() {}  // the simulator counts loads and stores of matrices
METAL_FUNC uint __msl_lane() { return __msl_apple_lane(__gpu_lane()); }
METAL_FUNC uint __msl_pair_index() {
  uint quad = __msl_lane() / 4, row = (quad & 4) + __msl_lane() / 2 % 4;
  return row * 4 + (quad & 2) + __msl_lane() % 2;
}

// Sets the position of the thread for the shim's launch header. Threads of a threadgroup are
// numbered by SIMD group, and inside each in the order of Apple's lanes.
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
  place.simdgroup = __GPU_SIMDGROUP(physical);
  place.index = place.simdgroup * 32 + place.lane;
  place.position[0] = place.index % threads[0];
  place.position[1] = place.index / threads[0] % threads[1];
  place.position[2] = place.index / (threads[0] * threads[1]);
  place.pair = __msl_pair_index();
}
