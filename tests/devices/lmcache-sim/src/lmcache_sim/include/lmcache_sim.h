/* The simulated accelerator's driver: what native kernels and other languages call. C only, no torch.
 *
 * Link with or dlopen the library that lmcache_sim.library_path() names, in the process that uses it.
 *
 * Every function that returns int returns LMCACHE_SIM_OK or one of the codes below, unless it says otherwise;
 * lmcache_sim_last_error() then has one line about it, kept per thread. Devices are counted from 0.
 * A device address is a number to the host: kernels, which run on a stream's thread, translate it.
 */
#ifndef LMCACHE_SIM_H
#define LMCACHE_SIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

#define LMCACHE_SIM_API_VERSION 1

enum {
  LMCACHE_SIM_OK = 0,
  LMCACHE_SIM_NOT_READY = 1,       /* work is not finished; not an error */
  LMCACHE_SIM_INVALID_VALUE = 2,   /* an argument is wrong; nothing was done */
  LMCACHE_SIM_OUT_OF_MEMORY = 3,   /* the device is full */
  LMCACHE_SIM_ILLEGAL_ADDRESS = 4, /* a kernel left its allocation; stays until lmcache_sim_clear_error */
  LMCACHE_SIM_PEER_LOST = 5,       /* the process that owns an event or memory has ended, or dropped it */
  LMCACHE_SIM_FORKED = 6,          /* this process was forked from one that uses the device */
  LMCACHE_SIM_KERNEL_FAILED = 7,   /* a kernel reported a failure of its own; reported once */
  LMCACHE_SIM_GUARD_DAMAGED = 8,   /* bytes beside an allocation were overwritten */
  LMCACHE_SIM_SYSTEM = 9           /* the operating system refused something */
};

enum { LMCACHE_SIM_H2D = 1, LMCACHE_SIM_D2H = 2, LMCACHE_SIM_D2D = 3 };

#define LMCACHE_SIM_HANDLE_BYTES 64
#define LMCACHE_SIM_UUID_BYTES 16

/* A stream as an integer; never 0. Streams live as long as the process. */
typedef uint64_t lmcache_sim_stream;
typedef struct lmcache_sim_event_s* lmcache_sim_event;

/* A kernel. Runs on the stream's thread with a copy of its arguments. */
typedef void (*lmcache_sim_kernel)(void* args);
/* A host callback; status is LMCACHE_SIM_OK if all before it on the stream succeeded. Runs in any case, once. */
typedef void (*lmcache_sim_host_fn)(void* arg, int status);

typedef struct {
  uint64_t capacity;    /* bytes of the device */
  uint64_t allocated;   /* bytes of live allocations, whole pages */
  uint64_t reserved;    /* the same and what was freed but may still be in use by queued work */
  uint64_t peak;        /* highest `allocated` so far */
  uint64_t allocations; /* count of live allocations */
  uint64_t imported;    /* count of allocations of other processes that are mapped here */
} lmcache_sim_memory_info;

typedef struct {
  int32_t device;
  int32_t imported; /* 1 if another process owns the memory */
  uint64_t base;    /* first device address of the allocation */
  uint64_t bytes;   /* as asked for */
  uint64_t id;      /* unique in the owning process */
} lmcache_sim_pointer_info;

const char* lmcache_sim_last_error(void);

/* devices */
int lmcache_sim_device_count(void); /* -1 if the settings in the environment are wrong */
int lmcache_sim_device_uuid(int device, uint8_t out[LMCACHE_SIM_UUID_BYTES]);
int lmcache_sim_synchronize(int device);
int lmcache_sim_device_error(int device); /* the lasting error's code, without waiting */
int lmcache_sim_clear_error(int device);  /* forget lasting and pending errors, after waiting for all streams */
int lmcache_sim_used(void);               /* 1 once a device was used in this process */
void lmcache_sim_shutdown(void);          /* stop after the running kernels; queued work is lost */

/* memory */
int lmcache_sim_malloc(int device, uint64_t bytes, uint64_t* address);
int lmcache_sim_free(uint64_t address); /* in stream order: reused when all work queued so far has ended */
int lmcache_sim_get_memory_info(int device, lmcache_sim_memory_info* info);
int lmcache_sim_reset_peak(int device);
int lmcache_sim_get_pointer_info(uint64_t address, lmcache_sim_pointer_info* info);
/* Waits for the device; LMCACHE_SIM_GUARD_DAMAGED names the first damage, which is then repaired. */
int lmcache_sim_check_guards(int device);
int lmcache_sim_host_register(void* memory, uint64_t bytes);
int lmcache_sim_host_unregister(void* memory);
int lmcache_sim_host_is_registered(const void* memory);

/* streams */
int lmcache_sim_default_stream(int device, lmcache_sim_stream* stream);
int lmcache_sim_new_stream(int device, int priority, lmcache_sim_stream* stream); /* from a pool of 32 per device */
int lmcache_sim_stream_device(lmcache_sim_stream stream); /* -1 if it is none */
int lmcache_sim_stream_query(lmcache_sim_stream stream);  /* OK or NOT_READY or the pending error's code */
int lmcache_sim_stream_synchronize(lmcache_sim_stream stream);
int lmcache_sim_set_delay(int64_t microseconds); /* before every kernel, copy and callback, on all streams */
int lmcache_sim_stream_set_delay(lmcache_sim_stream stream, int64_t microseconds); /* added to that */
int lmcache_sim_stream_pause(lmcache_sim_stream stream);  /* begin nothing more until it is resumed */
int lmcache_sim_stream_resume(lmcache_sim_stream stream);
int lmcache_sim_stream_sleep(lmcache_sim_stream stream, int64_t microseconds);
/* 0 removes a limit. Bandwidth is shared by all streams of a device. */
int lmcache_sim_set_link(double gigabytes_per_second, int64_t latency_microseconds);

/* work */
int lmcache_sim_launch(lmcache_sim_stream stream, lmcache_sim_kernel kernel, const void* args, size_t size);
/* The same without a copy: `release(arg)` runs later on some host thread that uses the device, not the stream's. */
int lmcache_sim_launch_owned(lmcache_sim_stream stream, lmcache_sim_kernel kernel, void* arg,
                             void (*release)(void*));
int lmcache_sim_memcpy_async(lmcache_sim_stream stream, uint64_t to, uint64_t from, uint64_t bytes, int kind);
int lmcache_sim_memset_async(lmcache_sim_stream stream, uint64_t to, int value, uint64_t bytes);
int lmcache_sim_host_func(lmcache_sim_stream stream, lmcache_sim_host_fn function, void* arg);

/* for kernels */
/* The bytes at a device address, or NULL if [address, address + bytes) is not inside one allocation; in a kernel
 * that is an illegal address. Outside of kernels only for tests. */
void* lmcache_sim_translate(uint64_t address, uint64_t bytes);
void lmcache_sim_charge_link(uint64_t bytes); /* the kernel moved so many bytes between host and device */
void lmcache_sim_fail(const char* reason);    /* the kernel could not do its work */

/* events; timing is always kept */
int lmcache_sim_event_create(int device, lmcache_sim_event* event);
int lmcache_sim_event_destroy(lmcache_sim_event event);
int lmcache_sim_event_device(lmcache_sim_event event);
int lmcache_sim_event_record(lmcache_sim_event event, lmcache_sim_stream stream);
int lmcache_sim_stream_wait_event(lmcache_sim_stream stream, lmcache_sim_event event);
int lmcache_sim_event_query(lmcache_sim_event event); /* OK, NOT_READY or an error; never blocks */
int lmcache_sim_event_synchronize(lmcache_sim_event event);
int lmcache_sim_event_elapsed(lmcache_sim_event begin, lmcache_sim_event end, double* milliseconds);
int lmcache_sim_event_export(lmcache_sim_event event, uint8_t handle[LMCACHE_SIM_HANDLE_BYTES]);
int lmcache_sim_event_import(const uint8_t handle[LMCACHE_SIM_HANDLE_BYTES], lmcache_sim_event* event);

/* memory of other processes of the same user */
int lmcache_sim_ipc_export(uint64_t address, uint8_t handle[LMCACHE_SIM_HANDLE_BYTES], uint64_t* offset);
/* Maps the whole allocation; one that is open already is counted. Its owner opening it gets its own address. */
int lmcache_sim_ipc_open(const uint8_t handle[LMCACHE_SIM_HANDLE_BYTES], uint64_t* base);
int lmcache_sim_ipc_close(uint64_t base); /* unmapped in stream order when closed as often as opened */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
