// The execution engine's C interface: runs one dispatch of a host-compiled Metal kernel on the CPU.
// Called from Python through ctypes, so it is plain C and every field has a fixed width.
#pragma once

#include <cstdint>

extern "C" {

enum SimulatorSpace : uint32_t {
  SPACE_DEVICE,
  SPACE_THREADGROUP,
  SPACE_CONSTANT,
  SPACE_THREAD,
  SPACE_COUNT
};

struct SimulatorBuffer {
  uint32_t index;     // the kernel's [[buffer(index)]]
  uint32_t space;     // where the kernel declares it: SPACE_DEVICE or SPACE_CONSTANT
  uint32_t writable;  // 0: a write to it is a fault
  void* storage;      // first byte of the tensor's storage, which bounds every access
  uint64_t bytes;     // size of the storage
  uint64_t offset;    // where in the storage the argument points
  // For each byte of the storage, 0 until something is written there; null: all of it is. Checked
  // runs set it, and a read of a byte that has 0 is a fault.
  uint8_t* initialised;
  const void* tensor;  // the caller's; the engine does not look at it
};

// How the elements of cooperative tensors are spread over lanes.
enum SimulatorLaneMap : uint32_t {
  LANE_MAP_APPLE10,  // M5, A19
  LANE_MAP_APPLE9,   // and all earlier families
  LANE_MAP_RANDOM,   // by a seed
};

enum SimulatorLimit : uint32_t {
  SIMULATOR_MAX_ARGUMENTS = 31,
  SIMULATOR_OPERATIONS = 7,  // kinds, in the order of torch_metal_attn/simulator/llvm/operations.py
};

// Functions of Python's C API, for a caller that holds the interpreter's lock: the engine gives it
// up while it runs, and stops when a signal's handler has raised.
struct SimulatorInterpreter {
  void* (*save_thread)(void);            // PyEval_SaveThread
  void (*restore_thread)(void* thread);  // PyEval_RestoreThread
  int (*check_signals)(void);            // PyErr_CheckSignals
};

struct SimulatorDispatch {
  void* entry;  // the kernel's entry thunk, from the image
  void* bind;   // the image's __msl_bind
  const struct SimulatorBuffer* buffers;
  uint32_t buffer_count;
  uint32_t checked;  // the image was built with checks: verify every access
  uint64_t seed;     // 0: threadgroups and SIMD groups in order; else shuffled by it
  uint32_t workers;  // host threads to use; 0: one per core
  uint32_t threads_per_threadgroup[3];
  uint64_t threads_per_grid[3];  // need not be a multiple: edge threadgroups are then smaller
  uint64_t threadgroup_argument_bytes[SIMULATOR_MAX_ARGUMENTS];  // [[threadgroup(i)]], 0: unused
  const struct SimulatorInterpreter* interpreter;                // null: nothing interrupts
  uint64_t step_limit;  // of a threadgroup's rounds of loops, if checked; 0: the default
  uint32_t lane_map;    // a SimulatorLaneMap
  uint32_t rounds;      // relaxed tensor operations: 1 round float operands, 0 truncate
  uint64_t lane_map_seed;
  uint32_t strict_simd;  // a SIMD operation that not all lanes reach is a fault, if checked
};

// Counts of lane (thread) instructions, summed over all threads; matrix and tensor operations,
// shuffles, reductions, votes and barriers are per SIMD group (threadgroup_barriers: per
// threadgroup). Memory counts need a checked image.
struct SimulatorCounters {
  uint64_t threadgroups;
  uint64_t matrix_operations;
  uint64_t tensor_operations;
  uint64_t tensor_multiplications;
  uint64_t shuffles;
  uint64_t reductions;
  uint64_t votes;
  uint64_t simdgroup_barriers;
  uint64_t threadgroup_barriers;
  uint64_t loads[SPACE_COUNT];
  uint64_t load_bytes[SPACE_COUNT];
  uint64_t stores[SPACE_COUNT];
  uint64_t store_bytes[SPACE_COUNT];
  uint64_t operations[SIMULATOR_OPERATIONS];
  uint64_t
      threadgroup_bytes;  // the largest static + argument threadgroup memory of any threadgroup
};

enum SimulatorFaultKind : uint32_t {
  FAULT_NONE,
  FAULT_OUT_OF_BOUNDS,  // device or constant memory, beyond the argument's storage
  FAULT_THREADGROUP_OUT_OF_BOUNDS,
  FAULT_UNINITIALISED,  // memory or a private variable read before any write
  FAULT_RACE,           // two threads, at least one writing, and nothing orders them
  FAULT_DIVERGENT_BARRIER,
  FAULT_PARTIAL_SIMD,  // SIMD or matrix operation that not every lane of the SIMD group reached
  FAULT_THREADGROUP_MEMORY,  // more than 32 KiB
  FAULT_CONSTANT_WRITE,
  FAULT_MISALIGNED,   // an access wider than its address's alignment allows
  FAULT_NO_PROGRESS,  // threads poll atomic memory and nothing else happens
  FAULT_PRIVATE_OUT_OF_BOUNDS,
  FAULT_INTEGER_DIVISION,  // by zero, or of the least integer by -1
  FAULT_FLOAT_TO_INTEGER,  // of a value that the integer type does not have
  FAULT_SHIFT,             // by a negative number of bits, or by the width or more
  FAULT_SIMD_LANE,         // a shuffle from a lane past the last, or broadcasts of several lanes
  FAULT_ENDLESS_LOOP,      // more rounds of loops in a threadgroup than the limit
  FAULT_STACK_OVERFLOW,
  FAULT_MISSING_RETURN,
  FAULT_TENSOR,  // a tensor operation that is used where it cannot be
  FAULT_CLAMP,   // to a minimum above the maximum
};

struct SimulatorFaultReport {
  uint32_t kind;
  uint32_t site;            // index into the image's site table; ~0u: unknown
  uint32_t other_site;      // a race's earlier access; ~0u: none
  uint32_t threadgroup[3];  // threadgroup_position_in_grid
  uint32_t thread[3];       // thread_position_in_threadgroup
  char message[320];        // what happened, in words: sizes, offsets, variable
};

// 0: ran to its end. 1: stopped at a fault, written to *fault. 2: a bad request, said in
// fault->message. 3: interrupted, and Python's exception is set.
__attribute__((visibility("default"))) int metal_attn_simulator_run(
    const struct SimulatorDispatch* dispatch, struct SimulatorCounters* counters,
    struct SimulatorFaultReport* fault);

}  // extern "C"
