// The C interface of the execution engine, which runs one dispatch of a host-compiled Metal kernel.
// Python calls it through ctypes.
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
  uint32_t space;     // of the kernel's parameter: SPACE_DEVICE or SPACE_CONSTANT
  uint32_t writable;  // 0: a write to the buffer is a fault
  void* storage;      // first byte of the tensor's storage, which bounds all accesses
  uint64_t bytes;     // size of the storage
  uint64_t offset;    // of the argument in the storage, in bytes
  // A mark for each byte of the storage, 0 until the byte is written. Checked runs update the
  // marks, and a read of a byte whose mark is 0 is a fault. Null: all bytes count as written.
  uint8_t* initialised;
  const void* tensor;  // not used by the engine
};

// The layouts of cooperative tensors.
enum SimulatorLaneMap : uint32_t {
  LANE_MAP_APPLE10,  // GPU family 10: M5 and A19
  LANE_MAP_APPLE9,   // GPU family 9 and all earlier families
  LANE_MAP_RANDOM,   // a permutation that lane_map_seed chooses
};

enum SimulatorLimit : uint32_t {
  SIMULATOR_MAX_ARGUMENTS = 31,
  SIMULATOR_OPERATIONS = 7,  // kinds of operations: torch_metal_attn/simulator/llvm/operations.py
};

// Functions of Python's C API, for a caller that holds the interpreter's lock. The engine releases
// the lock during a run, and stops the run after a signal handler has raised an exception.
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
  uint32_t checked;  // 1: the image was built with checks
  uint64_t seed;     // shuffles threadgroups and SIMD groups; 0: they run in order
  uint32_t workers;  // host threads; 0: one for each core
  uint32_t threads_per_threadgroup[3];
  uint64_t threads_per_grid[3];  // threadgroups at the grid's edge may be smaller
  uint64_t threadgroup_argument_bytes[SIMULATOR_MAX_ARGUMENTS];  // [[threadgroup(i)]]; 0: not used
  const struct SimulatorInterpreter* interpreter;  // null: signals do not stop the run
  uint64_t step_limit;  // checked runs: the most loop rounds in a threadgroup; 0: the default
  uint32_t lane_map;    // a SimulatorLaneMap
  uint32_t rounds;      // 1: relaxed tensor operations round float operands; 0: they truncate them
  uint64_t lane_map_seed;
  uint32_t strict_simd;  // 1: in checked runs, all lanes must reach a SIMD operation
};

// Counts of instructions, summed over all threads. Matrix and tensor operations, shuffles,
// reductions, votes and simdgroup_barriers are counted once for each SIMD group, and
// threadgroup_barriers once for each threadgroup. Loads and stores are counted in checked images.
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
  uint64_t threadgroup_bytes;  // of variables and arguments; the largest sum of any threadgroup
};

enum SimulatorFaultKind : uint32_t {
  FAULT_NONE,
  FAULT_OUT_OF_BOUNDS,  // an access to device or constant memory outside the argument's storage
  FAULT_THREADGROUP_OUT_OF_BOUNDS,
  FAULT_UNINITIALISED,  // memory or a private variable is read before it is written
  FAULT_RACE,           // unordered accesses of two threads, at least one of them a write
  FAULT_DIVERGENT_BARRIER,
  FAULT_PARTIAL_SIMD,        // not all lanes of the SIMD group reach a SIMD or matrix operation
  FAULT_THREADGROUP_MEMORY,  // more than 32 KiB
  FAULT_CONSTANT_WRITE,
  FAULT_MISALIGNED,   // an address is not a multiple of the access's size
  FAULT_NO_PROGRESS,  // threads poll atomic memory and nothing else happens
  FAULT_PRIVATE_OUT_OF_BOUNDS,
  FAULT_INTEGER_DIVISION,  // division by zero, or division of the smallest integer by -1
  FAULT_FLOAT_TO_INTEGER,  // the value is outside the integer type's range
  FAULT_SHIFT,             // a shift by a negative number of bits, or by the type's width or more
  FAULT_SIMD_LANE,         // a shuffle from a lane that does not exist, or an ambiguous broadcast
  FAULT_ENDLESS_LOOP,      // the loops of a threadgroup run more rounds than step_limit
  FAULT_STACK_OVERFLOW,
  FAULT_MISSING_RETURN,
  FAULT_TENSOR,  // an invalid use of a tensor operation
  FAULT_CLAMP,   // the minimum is above the maximum
};

struct SimulatorFaultReport {
  uint32_t kind;
  uint32_t site;            // index into the image's site table; ~0u: unknown
  uint32_t other_site;      // a second site, as of a race's earlier access; ~0u: none
  uint32_t threadgroup[3];  // threadgroup_position_in_grid
  uint32_t thread[3];       // thread_position_in_threadgroup
  char message[320];        // what happened, in words: sizes, offsets, variable
};

// Returns 0 if the run completes; 1 after a fault, which is in *fault; 2 if the request is invalid,
// with the reason in fault->message; 3 if a signal interrupts it, with Python's exception set.
__attribute__((visibility("default"))) int metal_attn_simulator_run(
    const struct SimulatorDispatch* dispatch, struct SimulatorCounters* counters,
    struct SimulatorFaultReport* fault);

}  // extern "C"
