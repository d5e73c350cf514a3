#include "signals.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#ifdef __APPLE__
#include <mach-o/getsect.h>
#include <sys/ucontext.h>
#else
#include <link.h>
#include <ucontext.h>
#endif

#include <mutex>

#include "worker.h"

namespace metal_attn::simulator {

// A signal that is ignored by default, and that PyTorch and Python do not use.
const int kStopSignal = SIGURG;

namespace {

const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, kStopSignal};
constexpr int kCount = sizeof kSignals / sizeof *kSignals;

std::mutex installing;
int users = 0;
struct sigaction old_actions[kCount];
thread_local Worker* thread_worker = nullptr;

uintptr_t interrupted_at(const ucontext_t& context) {
#if defined(__APPLE__) && defined(__aarch64__)
  return arm_thread_state64_get_pc(context.uc_mcontext->__ss);
#elif defined(__APPLE__)
  return context.uc_mcontext->__ss.__rip;
#elif defined(__aarch64__)
  return context.uc_mcontext.pc;
#else
  return static_cast<uintptr_t>(context.uc_mcontext.gregs[REG_RIP]);
#endif
}

// Makes the interrupted thread continue at `target`.
void go_on_at(ucontext_t& context, const Context& target) {
#if defined(__APPLE__) && defined(__aarch64__)
  auto& state = context.uc_mcontext->__ss;
  arm_thread_state64_set_sp(state, reinterpret_cast<uintptr_t>(target.stack));
  arm_thread_state64_set_fp(state, reinterpret_cast<uintptr_t>(target.frame));
  arm_thread_state64_set_pc_fptr(state, target.resume);
#elif defined(__APPLE__)
  auto& state = context.uc_mcontext->__ss;
  state.__rsp = reinterpret_cast<uintptr_t>(target.stack);
  state.__rbp = reinterpret_cast<uintptr_t>(target.frame);
  state.__rip = reinterpret_cast<uintptr_t>(target.resume);
#elif defined(__aarch64__)
  auto& state = context.uc_mcontext;
  state.sp = reinterpret_cast<uintptr_t>(target.stack);
  state.regs[29] = reinterpret_cast<uintptr_t>(target.frame);
  state.pc = reinterpret_cast<uintptr_t>(target.resume);
#else
  auto& registers = context.uc_mcontext.gregs;
  registers[REG_RSP] = reinterpret_cast<greg_t>(target.stack);
  registers[REG_RBP] = reinterpret_cast<greg_t>(target.frame);
  registers[REG_RIP] = reinterpret_cast<greg_t>(target.resume);
#endif
}

void forward(int signal, siginfo_t* info, void* context) {
  int index = 0;
  while (kSignals[index] != signal) ++index;
  const struct sigaction& action = old_actions[index];
  if (action.sa_flags & SA_SIGINFO) return action.sa_sigaction(signal, info, context);
  if (action.sa_handler == SIG_IGN) return;
  if (action.sa_handler != SIG_DFL) return action.sa_handler(signal);
  // By default kStopSignal is ignored. Other signals are raised again when the handler returns.
  if (signal != kStopSignal) sigaction(signal, &action, nullptr);
}

void handle(int signal, siginfo_t* info, void* interrupted) {
  Worker* worker = thread_worker;
  auto& context = *static_cast<ucontext_t*>(interrupted);
  if (!worker || !worker->in_fiber) return forward(signal, info, interrupted);
  if (signal == kStopSignal) {
    // Code of the engine or a library may hold locks, so it is not stopped. The signal is sent
    // again until it interrupts the kernel's code.
    const CodeRange& code = worker->run->code;
    uintptr_t at = interrupted_at(context);
    if (at < code.begin || at >= code.end) return;
  }
  worker->stopped_by = signal;
  worker->stopped_at = info->si_addr;
  go_on_at(context, worker->host);
}

}  // namespace

SignalHandlers::SignalHandlers() {
  std::lock_guard<std::mutex> lock(installing);
  if (users++) return;
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &old_actions[i]);
}

SignalHandlers::~SignalHandlers() {
  std::lock_guard<std::mutex> lock(installing);
  if (--users) return;
  for (int i = 0; i < kCount; ++i) {
    struct sigaction now;
    sigaction(kSignals[i], nullptr, &now);
    if (now.sa_sigaction == handle) sigaction(kSignals[i], &old_actions[i], nullptr);
  }
}

void guard_thread(Worker& worker) {
  thread_worker = &worker;
  stack_t stack = {};
  stack.ss_sp = worker.signal_stack;
  stack.ss_size = sizeof worker.signal_stack;
  sigaltstack(&stack, nullptr);
  sigset_t blocked;
  sigfillset(&blocked);
  for (int signal : kSignals) sigdelset(&blocked, signal);
  pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
}

#ifdef __APPLE__
CodeRange code_around(const void* function) {
  Dl_info image;
  if (!dladdr(function, &image)) return {};
  unsigned long bytes = 0;
  auto header = static_cast<const struct mach_header_64*>(image.dli_fbase);
  auto begin = reinterpret_cast<uintptr_t>(getsectiondata(header, "__TEXT", "__text", &bytes));
  return {begin, begin + bytes};
}
#else
CodeRange code_around(const void* function) {
  struct Search {
    uintptr_t address;
    CodeRange range;
  } search = {reinterpret_cast<uintptr_t>(function), {}};
  dl_iterate_phdr(
      [](struct dl_phdr_info* image, size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        for (int i = 0; i < image->dlpi_phnum; ++i) {
          const auto& segment = image->dlpi_phdr[i];
          uintptr_t begin = image->dlpi_addr + segment.p_vaddr, end = begin + segment.p_memsz;
          if (segment.p_type != PT_LOAD || search.address < begin || search.address >= end)
            continue;
          search.range = {begin, end};
          return 1;
        }
        return 0;
      },
      &search);
  return search.range;
}
#endif

}  // namespace metal_attn::simulator
