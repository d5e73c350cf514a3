// The interface between a compiled Metal image and the engine. Both include it, so it is plain C++
// without headers.
//
// Every GPU thread runs on a stack inside its worker's region. MSL_REGION_BYTES is a region's size
// and alignment. A region's first word points to the running thread. So any code finds its thread
// by masking the stack pointer.
#pragma once

#define MSL_REGION_BYTES (1ul << 28)
#define MSL_SIMD_WIDTH 32u

enum __msl_operation : unsigned {
  MSL_SHUFFLE,
  MSL_REDUCTION,
  MSL_VOTE,
  MSL_ACTIVE,  // a vote that finds the active lanes, so some lanes may be missing
  MSL_MATRIX,
  MSL_MATRIX_ACCESS,
  MSL_SIMDGROUP_BARRIER,
  MSL_TENSOR,
};

enum __msl_access_flags : unsigned {
  MSL_READ = 0,
  MSL_WRITE = 1,
  MSL_ALIGNMENT_UNKNOWN = 2,  // the alignment may be less than the size of the access
  MSL_ATOMIC = 4,
  MSL_UPDATE = 8 | MSL_WRITE,  // reads the value that it replaces
  MSL_UNCOUNTED = 16,
};

// Kinds of undefined behaviour in a kernel's own code.
enum __msl_undefined_what : unsigned {
  MSL_INDEX,  // clang's sanitizer finds and describes this kind and the next four
  MSL_DIVISION,
  MSL_CONVERSION,
  MSL_SHIFT,
  MSL_RETURN,
  MSL_PRIVATE_ACCESS,
  MSL_DIVISION_OVERFLOW,
  MSL_LANE,
  MSL_INACTIVE_LANE,  // no fault if the lane does not exist
  MSL_UNINITIALISED,
  MSL_VECTOR_SHIFT,
  MSL_CLAMP,
  MSL_TENSOR_USE,  // described by a text
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
  unsigned pair;  // position of this lane's two elements in an 8x8 matrix: row * 4 + column / 2
  unsigned site;  // in checked images, the site of its next call into the engine
  // The thread's next meeting with other lanes: its number in program order, and the number of
  // loops that contain it. `rounds` has these loops, the outermost first (llvm/rounds.py).
  unsigned place;
  unsigned depth;
  __msl_round_of_loop rounds[MSL_MOST_LOOPS];
};

// One threadgroup of a dispatch.
struct __msl_launch {
  void* buffers[31];
  void* threadgroup_memory[31];
  unsigned position[3];          // threadgroup_position_in_grid
  unsigned threads[3];           // of this threadgroup, fewer at the grid's edge
  unsigned dispatch_threads[3];  // of a threadgroup that is not at the edge
  unsigned threadgroups[3];      // of the grid
  unsigned grid[3];              // threads of the grid
  unsigned simdgroups;           // of this threadgroup
};

struct __msl_worker {
  __msl_thread* running;
  unsigned long steps;  // rounds of loops that the threadgroup may still run
  unsigned polls;       // how often the threadgroup polled memory since its last progress
  unsigned rounds;      // relaxed precision: 1 rounds float operands, 0 truncates them
  unsigned is_logical;  // indices of transposed cooperative tensors: 1 logical, 0 as stored
  float* scratch;       // holds the matrices of a tensor operation
};

// The maximum number of elements of each matrix of a tensor operation.
#define MSL_MOST_LEFT 4096u
#define MSL_MOST_RIGHT 8192u
#define MSL_MOST_DESTINATION 16384u

// The role of a cooperative tensor in a tensor operation.
enum __msl_operand : unsigned {
  MSL_LEFT,
  MSL_RIGHT,
  MSL_DESTINATION,
  MSL_ROWS,     // a reduction's destination with one element for each row
  MSL_COLUMNS,  // a reduction's destination with one element for each column
};
struct __msl_tensor_operation {
  unsigned simdgroups;            // of the scope: 1, or all of the threadgroup
  unsigned long multiplications;  // of elements
};
// An element of a cooperative tensor is row << 16 | column of the matrix as stored.
#define MSL_NO_ELEMENT ~0u
struct __msl_lane_map {
  unsigned capacity;         // slots of a thread
  const unsigned* elements;  // [thread][slot]; MSL_NO_ELEMENT for an empty slot
};

// Values that the lanes of a SIMD group deposit and read. `mask` has a bit for each active lane.
struct __msl_slot {
  alignas(16) unsigned char bytes[16];
};
struct __msl_exchange {
  __msl_slot lanes[MSL_SIMD_WIDTH];
  __msl_slot result;
  unsigned mask;
};

// Two neighbouring elements of a matrix row: two floats, or two 16-bit elements in the low 32 bits.
typedef float __msl_pair __attribute__((vector_size(8)));

// Pairs are in row-major order of the 8x8 matrix (__msl_thread::pair).
struct __msl_matrices {
  alignas(32) __msl_pair a[32];
  __msl_pair b[32];
  __msl_pair c[32];
  __msl_pair d[32];
};

// Called once, by the last lane to arrive, on the values that all lanes deposited.
typedef void (*__msl_combine)(void* deposits, unsigned mask);

// A product of a batch. The SIMD group's matrices hold its operands.
#define MSL_MOST_PRODUCTS 16u
struct __msl_product {
  __msl_combine combine;
  int accumulator;  // the index of the batch's product whose result is this product's `c`, or -1
};

// The engine's functions for an image. `site` is an address that identifies an operation of the
// source.
struct __msl_engine {
  __msl_pair (*matrix)(__msl_combine combine, __msl_pair a, __msl_pair b, __msl_pair c,
                       const void* site);
  // Plain images only: the memory for this lane's elements of a batch's operands (llvm/batches.py).
  void* (*operands)();
  void (*products)(const __msl_product* products, unsigned count, const void* site);
  const __msl_exchange* (*exchange)(__msl_combine combine, unsigned long low, unsigned long high,
                                    unsigned operation, const void* site);
  void (*threadgroup_barrier)(unsigned mem_flags, const void* site);
  void (*simdgroup_barrier)(unsigned mem_flags, const void* site);
  void* (*threadgroup_memory)(const char* name, unsigned long bytes, unsigned long alignment);
  void (*spin)();                // the thread may be waiting for another to change memory
  void (*enter)(unsigned site);  // checks at a function's start that the stack suffices
  // Checked images only. The site of an atomic operation is the one that was set last.
  void (*access)(const void* address, unsigned bytes, unsigned flags, unsigned site);
  void (*count)(unsigned what, unsigned n);
  void (*fence)(unsigned mem_flags, unsigned local);  // local: of a scope within the threadgroup
  void (*observe)(const void* address);               // after an atomic operation that reads
  void (*endless)(unsigned site);                     // no steps are left; does not return
  // Does not return. `about` is the sanitizer's description or the name of a variable.
  void (*undefined)(unsigned what, const void* about, unsigned long a, unsigned long b,
                    unsigned site);
  // A broadcast. `lane` must be the same in all lanes of each run of `width` lanes.
  const __msl_exchange* (*broadcast)(unsigned long low, unsigned long high, unsigned lane,
                                     unsigned width, const void* site);
  // An access to a private variable of `size` bytes at `base`. `marks` is null, or has a 1 for each
  // unwritten byte. `stored` and the result have a bit for each vector element that is defined.
  unsigned (*private_access)(const char* address, unsigned bytes, unsigned lanes, const char* base,
                             unsigned size, char* marks, unsigned flags, unsigned stored,
                             unsigned site);
  // The lane map of a matrix that is stored as `rows` by `columns`.
  const __msl_lane_map* (*lane_map)(unsigned operand, unsigned is_transposed, unsigned rows,
                                    unsigned columns, unsigned simdgroups);
  // When all threads of the scope have arrived, `combine` gets a slot of each thread, which has the
  // two pointers. is_further: continues an operation that was already counted.
  void (*tensor)(__msl_combine combine, void* elements, const __msl_tensor_operation* operation,
                 unsigned is_further, const void* site);
  // Checked images only: a simdgroup_load or simdgroup_store begins.
  void (*access_matrix)(const void* site);
  unsigned (*weak_fails)();  // true if a weak compare and exchange fails spuriously
};
