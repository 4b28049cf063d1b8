// Kernels that touch memory they must not touch: the fault ends the kernel, not the process.
#pragma once

#include <functional>

namespace sim {

void install_fault_handler();

// Runs a kernel on this thread. False if it faulted; what it held on its stack is then lost.
bool run_guarded(const std::function<void(int)>& kernel);
void* last_fault_address();

}  // namespace sim
