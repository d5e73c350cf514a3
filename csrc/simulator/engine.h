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
  uint32_t writable;  // 0: a write to it is a fault
  void* storage;      // first byte of the tensor's storage, which bounds all accesses
  uint64_t bytes;     // size of the storage
  uint64_t offset;    // of the argument in the storage
  // For each byte of the storage, 0 until it is written. Checked runs update it, and reading a byte
  // that has 0 is a fault. Null: all bytes are written.
  uint8_t* initialised;
  const void* tensor;  // for the caller only
};

// The layouts of cooperative tensors.
enum SimulatorLaneMap : uint32_t {
  LANE_MAP_APPLE10,  // M5, A19
  LANE_MAP_APPLE9,   // and all earlier families
  LANE_MAP_RANDOM,   // by a seed
};

enum SimulatorLimit : uint32_t {
  SIMULATOR_MAX_ARGUMENTS = 31,
  SIMULATOR_OPERATIONS = 7,  // kinds, in the order of torch_metal_attn/simulator/llvm/operations.py
};

// Functions of Python's C API, for a caller that holds the interpreter's lock. The engine releases
// it while it runs, and stops after a signal handler has raised.
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
  uint64_t seed;     // shuffles threadgroups and SIMD groups; 0: in order
  uint32_t workers;  // host threads; 0: one for each core
  uint32_t threads_per_threadgroup[3];
  uint64_t threads_per_grid[3];  // if it is no multiple, edge threadgroups are smaller
  uint64_t threadgroup_argument_bytes[SIMULATOR_MAX_ARGUMENTS];  // [[threadgroup(i)]], 0: unused
  const struct SimulatorInterpreter* interpreter;                // null: nothing interrupts
  uint64_t step_limit;  // the most rounds of loops in a threadgroup, if checked; 0: the default
  uint32_t lane_map;    // a SimulatorLaneMap
  uint32_t rounds;      // relaxed tensor operations: 1 round float operands, 0 truncate
  uint64_t lane_map_seed;
  uint32_t strict_simd;  // 1: a SIMD operation that not all lanes reach is a fault, if checked
};

// Counts of instructions, summed over all threads. Matrix and tensor operations, shuffles,
// reductions, votes and simdgroup_barriers are counted once for each SIMD group, and
// threadgroup_barriers once for each threadgroup. Counts of memory need a checked image.
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
  uint64_t threadgroup_bytes;  // the most of any threadgroup, in variables and arguments
};

enum SimulatorFaultKind : uint32_t {
  FAULT_NONE,
  FAULT_OUT_OF_BOUNDS,  // device or constant memory, beyond the argument's storage
  FAULT_THREADGROUP_OUT_OF_BOUNDS,
  FAULT_UNINITIALISED,  // memory or a private variable is read before it is written
  FAULT_RACE,           // unordered accesses of two threads, at least one of them a write
  FAULT_DIVERGENT_BARRIER,
  FAULT_PARTIAL_SIMD,        // not all lanes of the SIMD group reach a SIMD or matrix operation
  FAULT_THREADGROUP_MEMORY,  // more than 32 KiB
  FAULT_CONSTANT_WRITE,
  FAULT_MISALIGNED,   // an address is no multiple of the access's size
  FAULT_NO_PROGRESS,  // threads poll atomic memory and nothing else happens
  FAULT_PRIVATE_OUT_OF_BOUNDS,
  FAULT_INTEGER_DIVISION,  // by zero, or of the least integer by -1
  FAULT_FLOAT_TO_INTEGER,  // of a value outside the integer type's range
  FAULT_SHIFT,             // by a negative number of bits, or by the width or more
  FAULT_SIMD_LANE,         // a shuffle from a lane past the last, or broadcasts of several lanes
  FAULT_ENDLESS_LOOP,      // more rounds of loops in a threadgroup than the limit
  FAULT_STACK_OVERFLOW,
  FAULT_MISSING_RETURN,
  FAULT_TENSOR,  // an invalid use of a tensor operation
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

// Returns 0 after a whole run; 1 after a fault, which is in *fault; 2 for a bad request, with the
// reason in fault->message; 3 if interrupted, with Python's exception set.
__attribute__((visibility("default"))) int metal_attn_simulator_run(
    const struct SimulatorDispatch* dispatch, struct SimulatorCounters* counters,
    struct SimulatorFaultReport* fault);

}  // extern "C"
