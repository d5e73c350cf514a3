// The functions by which a kernel calls the engine. Each is a real call that is never inlined,
// copied or merged. So its return address identifies one operation of the source.
#pragma once
#include <__msl_types.h>

#define MSL_ENTRY                                                            \
  inline __attribute__((noinline, convergent, nomerge, visibility("hidden"), \
                        disable_sanitizer_instrumentation, no_instrument_function))

struct __msl_words {
  ulong low, high;
};

enum __msl_direction : uint {
  MSL_TO_LANE,
  MSL_XOR,
  MSL_UP,
  MSL_DOWN,
  MSL_ROTATE_UP,
  MSL_ROTATE_DOWN
};

extern "C" {

static const __msl_engine* __msl_table;

__attribute__((used, visibility("default"), disable_sanitizer_instrumentation,
               no_instrument_function)) void
__msl_bind(const void* engine) {
  __atomic_store_n(&__msl_table, (const __msl_engine*)engine, __ATOMIC_RELAXED);
}

#ifdef MSL_CHECKED
#define MSL_LOOKUP \
  static __attribute__((noinline, const, unused, disable_sanitizer_instrumentation))
#else
#define MSL_LOOKUP static inline __attribute__((always_inline, const, unused))
#endif

// The worker is at the start of the region that holds the thread's stack (abi.h).
static inline __attribute__((always_inline, const, unused)) __msl_worker* __msl_this_worker() {
  ulong stack;
#if defined(__x86_64__)
  asm("movq %%rsp, %0" : "=r"(stack));
#else
  asm("mov %0, sp" : "=r"(stack));
#endif
  return (__msl_worker*)(stack & ~(MSL_REGION_BYTES - 1));
}

// Tells the engine that the threadgroup does more than poll memory.
MSL_INTERNAL void __msl_progress() { __msl_this_worker()->polls = 0; }

MSL_LOOKUP const __msl_thread* __msl_this_thread() { return __msl_this_worker()->running; }

MSL_LOOKUP uint __msl_lane() { return __msl_this_thread()->lane; }
MSL_LOOKUP uint __msl_pair_index() { return __msl_this_thread()->pair; }

MSL_ENTRY __msl_pair __msl_matrix(__msl_combine combine, __msl_pair a, __msl_pair b, __msl_pair c) {
  return __msl_table->matrix(combine, a, b, c, __builtin_return_address(0));
}

#ifndef MSL_CHECKED
// The plain build's pass over the compiled code inserts calls to these (llvm/batches.py).
MSL_ENTRY __attribute__((used)) void* __msl_operands() { return __msl_table->operands(); }
MSL_ENTRY __attribute__((used)) void __msl_products(const __msl_product* products, uint count) {
  __msl_table->products(products, count, __builtin_return_address(0));
}
#endif
// Checks that a lane is one of `lanes`.
MSL_ENTRY void __msl_check_lane(uint lane, uint lanes) {
  if (lane >= lanes) __msl_table->undefined(MSL_LANE, nullptr, lane, lanes, ~0u);
}

// Checks that a lane whose value is read is active.
MSL_INTERNAL inline void __msl_check_active(const __msl_exchange* box, uint lane) {
#ifdef MSL_CHECKED
  if (!(box->mask >> lane & 1))
    __msl_table->undefined(MSL_INACTIVE_LANE, nullptr, lane, box->mask, ~0u);
#endif
}

MSL_ENTRY __msl_words __msl_shuffle(ulong low, ulong high, uint direction, uint argument) {
  uint lane = __msl_lane();
#ifdef MSL_CHECKED
  if (direction == MSL_TO_LANE || direction == MSL_XOR)
    __msl_check_lane(direction == MSL_XOR ? lane ^ argument : argument, MSL_SIMD_WIDTH);
#endif
  const __msl_exchange* box =
      __msl_table->exchange(nullptr, low, high, MSL_SHUFFLE, __builtin_return_address(0));
  uint from = argument;
  switch (direction) {
    case MSL_TO_LANE:
      break;
    case MSL_XOR:
      from = lane ^ argument;
      break;
    case MSL_UP:
      from = argument <= lane ? lane - argument : lane;
      break;
    case MSL_DOWN:
      from = lane + argument < MSL_SIMD_WIDTH ? lane + argument : lane;
      break;
    case MSL_ROTATE_UP:
      from = lane - argument;
      break;
    case MSL_ROTATE_DOWN:
      from = lane + argument;
      break;
  }
  __msl_check_active(box, from % MSL_SIMD_WIDTH);
  return __builtin_bit_cast(__msl_words, box->lanes[from % MSL_SIMD_WIDTH]);
}

#ifdef MSL_CHECKED
// Broadcasts the value of lane `lane` of each run of `width` lanes within the run.
MSL_ENTRY __msl_words __msl_broadcast(ulong low, ulong high, uint lane, uint width) {
  __msl_check_lane(lane, width);
  const __msl_exchange* box =
      __msl_table->broadcast(low, high, lane, width, __builtin_return_address(0));
  uint from = __msl_lane() / width * width + lane;
  __msl_check_active(box, from);
  return __builtin_bit_cast(__msl_words, box->lanes[from]);
}
#endif

// Returns the result that `combine` computes for all lanes.
MSL_ENTRY __msl_words __msl_reduce(__msl_combine combine, ulong low, ulong high, uint operation) {
  const __msl_exchange* box =
      __msl_table->exchange(combine, low, high, operation, __builtin_return_address(0));
  return __builtin_bit_cast(__msl_words, box->result);
}

// Returns the value that `combine` computes for this lane.
MSL_ENTRY __msl_words __msl_scan(__msl_combine combine, ulong low, ulong high) {
  const __msl_exchange* box =
      __msl_table->exchange(combine, low, high, MSL_REDUCTION, __builtin_return_address(0));
  return __builtin_bit_cast(__msl_words, box->lanes[__msl_lane()]);
}

#ifdef MSL_CHECKED
MSL_ENTRY void __msl_matrix_access() { __msl_table->access_matrix(__builtin_return_address(0)); }
#else
MSL_LOOKUP void __msl_matrix_access() {}
#endif

MSL_ENTRY void __msl_threadgroup_barrier(uint flags) {
  __msl_table->threadgroup_barrier(flags, __builtin_return_address(0));
}

MSL_ENTRY void __msl_simdgroup_barrier(uint flags) {
  __msl_table->simdgroup_barrier(flags, __builtin_return_address(0));
}

MSL_ENTRY void* __msl_threadgroup_memory(const char* name, ulong bytes, ulong alignment) {
  return __msl_table->threadgroup_memory(name, bytes, alignment);
}

// llvm/rounds.py inserts calls to these.
#define MSL_CALLBACK \
  __attribute__((noinline, used, visibility("hidden"), disable_sanitizer_instrumentation))
MSL_CALLBACK void __msl_place(uint place, uint depth) {
  __msl_thread* thread_ = __msl_this_worker()->running;
  thread_->place = place;
  thread_->depth = depth;
}
MSL_CALLBACK void __msl_round(uint level, uint loop, uint again) {
  __msl_round_of_loop& round_ = __msl_this_worker()->running->rounds[level];
  round_ = {loop, again ? round_.number + 1 : 0};
}

#ifdef MSL_UNDEFINED
// Like the sanitizer's handlers, these do not return. Otherwise the compiler would read memory
// again after each check.
MSL_ENTRY __attribute__((noreturn)) void __msl_vector_shift(ulong width, ulong amount) {
  __msl_table->undefined(MSL_VECTOR_SHIFT, nullptr, width, amount, ~0u);
  __builtin_trap();
}
MSL_ENTRY __attribute__((noreturn)) void __msl_refuse_clamp() {
  __msl_table->undefined(MSL_CLAMP, nullptr, 0, 0, ~0u);
  __builtin_trap();
}
#endif

#ifndef MSL_CHECKED
// Reports a missing return. So every trap is an access outside of a private variable.
MSL_ENTRY __attribute__((noreturn, used)) void __ubsan_handle_missing_return(const void*) {
  __msl_table->undefined(MSL_RETURN, nullptr, 0, 0, ~0u);
  __builtin_trap();
}
#endif

#ifdef MSL_CHECKED
// The checked build's pass over the compiled code inserts calls to these (llvm/instrument.py).
MSL_CALLBACK void __msl_access(const void* address, uint bytes, uint flags, uint site) {
  __msl_table->access(address, bytes, flags, site);
}
MSL_CALLBACK void __msl_count(uint what, uint n) { __msl_table->count(what, n); }
MSL_CALLBACK void __msl_site(uint site) { __msl_this_worker()->running->site = site; }
MSL_CALLBACK void __msl_step(uint site) {
  if (!__msl_this_worker()->steps--) __msl_table->endless(site);
}
MSL_CALLBACK void __msl_enter(uint site) { __msl_table->enter(site); }
MSL_CALLBACK void __msl_divide(uint is_undefined, uint site) {
  if (is_undefined) __msl_table->undefined(MSL_DIVISION_OVERFLOW, nullptr, 0, 0, site);
}
MSL_CALLBACK void __msl_undefined(uint what, const void* about, ulong a, ulong b, uint site) {
  __msl_table->undefined(what, about, a, b, site);
}
MSL_CALLBACK void __msl_defined(uint is_defined, const char* variable, uint site) {
  if (!is_defined) __msl_table->undefined(MSL_UNINITIALISED, variable, 0, 0, site);
}
MSL_CALLBACK void __msl_fill(char* memory, uint value, uint bytes) {
  __builtin_memset(memory, value, bytes);
}
MSL_CALLBACK void __msl_copy(char* to, const char* from, uint bytes) {
  __builtin_memmove(to, from, bytes);
}
MSL_CALLBACK uint __msl_private(const char* address, uint bytes, uint lanes, const char* base,
                                uint size, char* marks, uint flags, uint stored, uint site) {
  return __msl_table->private_access(address, bytes, lanes, base, size, marks, flags, stored, site);
}
#else
// clang inserts a call to this into each function that is not inlined.
inline __attribute__((noinline, used, no_instrument_function, visibility("hidden"))) void
__cyg_profile_func_enter_bare() {
  __msl_table->enter(~0u);
}
#endif

}  // extern "C"

#ifdef MSL_UNDEFINED
namespace metal {
template <class T>
constexpr ulong __width = 8 * sizeof(__element<T>);
// Checks that an amount is in range for the elements of a vector of type T.
template <class T, class Amount>
METAL_FUNC constexpr void __check_amount(Amount by) {
  if (__builtin_is_constant_evaluated()) return;
  ulong most;  // a negative amount becomes a large one
  if constexpr (__is_vector<Amount>)
    most = __builtin_reduce_max(__builtin_convertvector(by, vec<ulong, __length<Amount>>));
  else
    most = (ulong)by;
  if (most >= __width<T>) __msl_vector_shift(__width<T>, most);
}
}  // namespace metal
#endif
