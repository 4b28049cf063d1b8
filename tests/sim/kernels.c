/* Kernels for tests, in C as a vendor's would be. Each function queues one and returns the driver's code. */
#include <string.h>

#include "lmcache_sim.h"

typedef struct {
  uint64_t address, count, claimed;
} range_args;

static void add_one_kernel(void* raw) {
  const range_args* args = raw;
  unsigned char* data = lmcache_sim_translate(args->address, args->claimed);
  if (data == NULL) return;
  for (uint64_t i = 0; i < args->count; ++i) data[i] += 1;
}

/* Adds 1 to `count` bytes and says that it touches `claimed`. */
int add_one(uint64_t stream, uint64_t address, uint64_t count, uint64_t claimed) {
  const range_args args = {address, count, claimed};
  return lmcache_sim_launch(stream, add_one_kernel, &args, sizeof args);
}

static void overrun_kernel(void* raw) {
  const range_args* args = raw;
  char* data = lmcache_sim_translate(args->address, 1);
  if (data != NULL) memset(data, 7, args->count);
}

/* Writes `count` bytes and has only the first one checked. */
int overrun(uint64_t stream, uint64_t address, uint64_t count) {
  const range_args args = {address, count, 0};
  return lmcache_sim_launch(stream, overrun_kernel, &args, sizeof args);
}

static void poke_kernel(void* raw) {
  const range_args* args = raw;
  *(volatile char*)(uintptr_t)args->address = 1;
}

/* Writes to an address as it is. */
int poke(uint64_t stream, uint64_t address) {
  const range_args args = {address, 0, 0};
  return lmcache_sim_launch(stream, poke_kernel, &args, sizeof args);
}

static void give_up_kernel(void* raw) {
  (void)raw;
  lmcache_sim_fail("this kernel gives up");
}

int give_up(uint64_t stream) { return lmcache_sim_launch(stream, give_up_kernel, "", 0); }

typedef struct {
  void* host;
  uint64_t address, count;
} host_args;

static void to_host_kernel(void* raw) {
  const host_args* args = raw;
  const void* data = lmcache_sim_translate(args->address, args->count);
  if (data == NULL) return;
  memcpy(args->host, data, args->count);
  lmcache_sim_charge_link(args->count);
}

/* A kernel that writes host memory over the link. */
int to_host(uint64_t stream, void* host, uint64_t address, uint64_t count) {
  const host_args args = {host, address, count};
  return lmcache_sim_launch(stream, to_host_kernel, &args, sizeof args);
}
