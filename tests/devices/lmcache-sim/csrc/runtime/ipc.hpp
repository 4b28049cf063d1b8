// Memory that crosses processes.
#pragma once

#include <cstdint>

namespace sim {

uint64_t export_memory(uint64_t address, uint8_t* handle);  // the address's offset in its allocation
uint64_t open_memory(const uint8_t* handle);                // the allocation's base in this process

}  // namespace sim
