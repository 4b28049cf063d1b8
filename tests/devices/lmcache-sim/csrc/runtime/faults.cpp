#include "faults.hpp"

#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include <mutex>

namespace sim {

namespace {

struct sigaction earlier[2];
thread_local sigjmp_buf* way_out = nullptr;
thread_local void* fault_address = nullptr;

void on_fault(int signal, siginfo_t* info, void*) {
  if (way_out != nullptr) {
    fault_address = info->si_addr;
    siglongjmp(*way_out, 1);
  }
  // Not in a kernel: whoever handled it before handles it, when the instruction is tried again.
  sigaction(signal, &earlier[signal == SIGBUS], nullptr);
}

}  // namespace

void install_fault_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &earlier[0]);
    sigaction(SIGBUS, &action, &earlier[1]);
  });
}

bool run_guarded(const std::function<void(int)>& kernel) {
  sigjmp_buf here;
  if (sigsetjmp(here, 1) != 0) {
    way_out = nullptr;
    return false;
  }
  way_out = &here;
  try {
    kernel(0);
  } catch (...) {
    way_out = nullptr;
    throw;
  }
  way_out = nullptr;
  return true;
}

void* last_fault_address() { return fault_address; }

}  // namespace sim
