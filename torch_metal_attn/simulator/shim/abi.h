// The interface between a compiled Metal image and the engine: plain C++ without headers, included
// by both.
//
// Every GPU thread runs on a stack inside its worker's region, which is MSL_REGION_BYTES long and
// aligned to it, and whose first word points to the thread that runs now. So any code finds its
// thread by masking the stack pointer.
#pragma once

#define MSL_REGION_BYTES (1ul << 28)
#define MSL_SIMD_WIDTH 32u

enum __msl_operation : unsigned {
  MSL_SHUFFLE,
  MSL_REDUCTION,
  MSL_VOTE,
  MSL_ACTIVE,  // a vote whose meaning is the set of lanes that reach it: may be partial
  MSL_MATRIX,
  MSL_MATRIX_ACCESS,
  MSL_SIMDGROUP_BARRIER,
  MSL_TENSOR,
};

enum __msl_access_flags : unsigned {
  MSL_READ = 0,
  MSL_WRITE = 1,
  MSL_ALIGNMENT_UNKNOWN = 2,  // the compiler assumed less than the access's own size
  MSL_ATOMIC = 4,
  MSL_UPDATE = 8 | MSL_WRITE,  // it reads what it replaces
  MSL_UNCOUNTED = 16,
};

// Kinds of undefined behaviour in a kernel's own code.
enum __msl_undefined_what : unsigned {
  MSL_INDEX,  // this and the four that follow: found by clang's sanitizer, which describes it
  MSL_DIVISION,
  MSL_CONVERSION,
  MSL_SHIFT,
  MSL_RETURN,
  MSL_PRIVATE_ACCESS,
  MSL_DIVISION_OVERFLOW,
  MSL_LANE,
  MSL_INACTIVE_LANE,  // returns if the lane does not exist
  MSL_UNINITIALISED,
  MSL_VECTOR_SHIFT,
  MSL_CLAMP,
  MSL_TENSOR_USE,  // described in words
};

#define MSL_MOST_LOOPS 8u
#define MSL_UNKNOWN_PLACE ~0u  // in a function that is not inlined
struct __msl_round_of_loop {
  unsigned loop, number;
};

// One thread, as kernels' attributes and SIMD operations see it.
struct __msl_thread {
  unsigned position[3];  // thread_position_in_threadgroup
  unsigned index;        // thread_index_in_threadgroup
  unsigned lane;
  unsigned simdgroup;
  unsigned pair;  // where an 8x8 matrix keeps this lane's two elements: row * 4 + column / 2
  unsigned site;  // in checked images, the place of its next call into the engine
  // Its next meeting with other lanes: a number in the program's order, and how many loops there
  // are around it, of which `rounds` has the outermost first (llvm/rounds.py).
  unsigned place;
  unsigned depth;
  __msl_round_of_loop rounds[MSL_MOST_LOOPS];
};

// One threadgroup of a dispatch.
struct __msl_launch {
  void* buffers[31];
  void* threadgroup_memory[31];
  unsigned position[3];          // threadgroup_position_in_grid
  unsigned threads[3];           // of this threadgroup: fewer at the grid's edge
  unsigned dispatch_threads[3];  // of an inner threadgroup
  unsigned threadgroups[3];      // of the grid
  unsigned grid[3];              // threads of the grid
  unsigned simdgroups;           // of this threadgroup
};

struct __msl_worker {
  __msl_thread* running;
  unsigned long steps;  // rounds of loops in the threadgroup that are left
  unsigned polls;       // rounds of polling memory since anything else happened
  unsigned rounds;      // relaxed precision: 1 rounds float operands, 0 truncates them
  unsigned is_logical;  // indices of transposed cooperative tensors: 1 logical, 0 as stored
  float* scratch;       // during a tensor operation, for the matrices that it combines
};

// The most elements of each matrix of a tensor operation.
#define MSL_MOST_LEFT 4096u
#define MSL_MOST_RIGHT 8192u
#define MSL_MOST_DESTINATION 16384u

// The part of a tensor operation that a cooperative tensor has.
enum __msl_operand : unsigned {
  MSL_LEFT,
  MSL_RIGHT,
  MSL_DESTINATION,
  MSL_ROWS,     // a reduction's destination: one element for each row
  MSL_COLUMNS,  // likewise
};
// A tensor operation, for the engine.
struct __msl_tensor_operation {
  unsigned simdgroups;            // of the scope: 1, or all of the threadgroup
  unsigned long multiplications;  // of elements
};
// An element of a cooperative tensor: row << 16 | column of the matrix as it is stored.
#define MSL_NO_ELEMENT ~0u
struct __msl_lane_map {
  unsigned capacity;         // slots of a thread
  const unsigned* elements;  // of each slot, one thread after the other; or MSL_NO_ELEMENT
};

// Values that the lanes of a SIMD group deposit and read. `mask` has a bit for each lane that took
// part.
struct __msl_slot {
  alignas(16) unsigned char bytes[16];
};
struct __msl_exchange {
  __msl_slot lanes[MSL_SIMD_WIDTH];
  __msl_slot result;
  unsigned mask;
};

// Two neighbouring elements of a matrix row: two floats, or two 16-bit elements in the low half.
typedef float __msl_pair __attribute__((vector_size(8)));

// Pairs lie in row-major order of the 8x8 matrix (__msl_thread::pair).
struct __msl_matrices {
  alignas(32) __msl_pair a[32];
  __msl_pair b[32];
  __msl_pair c[32];
  __msl_pair d[32];
};

// Run once by the last lane to arrive, on what all have deposited.
typedef void (*__msl_combine)(void* deposits, unsigned mask);

// A product of a batch, whose operands lie in its place of a SIMD group's matrices.
#define MSL_MOST_PRODUCTS 16u
struct __msl_product {
  __msl_combine combine;
  int accumulator;  // the product of the batch whose result is its `c`, or -1
};

// The engine's functions for an image. `site` is an address that tells one operation of the source
// from another.
struct __msl_engine {
  __msl_pair (*matrix)(__msl_combine combine, __msl_pair a, __msl_pair b, __msl_pair c,
                       const void* site);
  // Plain images only: where this lane leaves its elements of a batch's operands (llvm/batches.py).
  void* (*operands)();
  void (*products)(const __msl_product* products, unsigned count, const void* site);
  const __msl_exchange* (*exchange)(__msl_combine combine, unsigned long low, unsigned long high,
                                    unsigned operation, const void* site);
  void (*threadgroup_barrier)(unsigned mem_flags, const void* site);
  void (*simdgroup_barrier)(unsigned mem_flags, const void* site);
  void* (*threadgroup_memory)(const char* name, unsigned long bytes, unsigned long alignment);
  void (*spin)();                // the thread may be waiting for another to change memory
  void (*enter)(unsigned site);  // a function begins: is there enough stack?
  // Checked images only.
  // An atomic operation's site is the one set last.
  void (*access)(const void* address, unsigned bytes, unsigned flags, unsigned site);
  void (*count)(unsigned what, unsigned n);
  void (*fence)(unsigned mem_flags, unsigned local);  // local: of a scope within the threadgroup
  void (*observe)(const void* address);               // after an atomic operation that reads
  void (*endless)(unsigned site);                     // no steps are left: does not return
  // Does not return. `about` is the sanitizer's description, or the name of a variable.
  void (*undefined)(unsigned what, const void* about, unsigned long a, unsigned long b,
                    unsigned site);
  // An exchange of a broadcast, whose `lane` must be the same in each run of `width` lanes.
  const __msl_exchange* (*broadcast)(unsigned long low, unsigned long high, unsigned lane,
                                     unsigned width, const void* site);
  // An access to a private variable of `size` bytes at `base`. `marks`, if it has any, are 1 for
  // each byte that was not written. Takes and returns a bit for each lane whose value is defined.
  unsigned (*private_access)(const char* address, unsigned bytes, unsigned lanes, const char* base,
                             unsigned size, char* marks, unsigned flags, unsigned stored,
                             unsigned site);
  // The lane map of a matrix of `rows` by `columns`, as stored.
  const __msl_lane_map* (*lane_map)(unsigned operand, unsigned is_transposed, unsigned rows,
                                    unsigned columns, unsigned simdgroups);
  // Once all threads of the scope are here, `combine` gets a slot of each, with the two pointers.
  // is_further: this goes on with an operation that was counted.
  void (*tensor)(__msl_combine combine, void* elements, const __msl_tensor_operation* operation,
                 unsigned is_further, const void* site);
  // Checked images only: a simdgroup_load or simdgroup_store begins.
  void (*access_matrix)(const void* site);
  unsigned (*weak_fails)();  // whether a weak compare and exchange fails without a reason
};
