// The driver's functions: one row each, for CUDA and for HIP. Where both have one shape, host code is the same.
//
//   ENTRY(field, CUDA's name, HIP's name, needed, (arguments))
//
// "needed" ones are there in every driver that serves; the others are looked at before they are called. An empty name
// means that this driver has no such function. Handles (contexts, streams, events, modules) and device memory are
// 64-bit integers, as in the ABI of both.
#ifndef LMCACHE_CUDA_ENTRIES_H
#define LMCACHE_CUDA_ENTRIES_H

#include <lmcache/abi.h>

#include <cstddef>

typedef lmc_u64 u64;

struct lmc_handle64 { // CUipcMemHandle, CUipcEventHandle and HIP's
    unsigned char bytes[64];
};

struct lmc_location {
    int type, id;
};

struct lmc_allocation { // CUmemAllocationProp
    int type, handle_types;
    lmc_location location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
static_assert(sizeof(lmc_allocation) == 32, "as the driver has it");

struct lmc_access { // CUmemAccessDesc
    lmc_location location;
    int flags;
};

struct lmc_copy_attributes { // CUmemcpyAttributes
    int order;
    lmc_location from, to;
    unsigned int flags;
};

#define LMC_ENTRIES(ENTRY)                                                                                         \
    ENTRY(init, "cuInit", "hipInit", 1, (unsigned int))                                                            \
    ENTRY(driver_version, "cuDriverGetVersion", "hipDriverGetVersion", 1, (int *))                                 \
    ENTRY(device_count, "cuDeviceGetCount", "hipGetDeviceCount", 1, (int *))                                       \
    ENTRY(device_get, "cuDeviceGet", "hipDeviceGet", 1, (int *, int))                                              \
    ENTRY(device_attribute, "cuDeviceGetAttribute", "hipDeviceGetAttribute", 1, (int *, int, int))                 \
    ENTRY(device_name, "cuDeviceGetName", "hipDeviceGetName", 1, (char *, int, int))                               \
    ENTRY(device_uuid, "cuDeviceGetUuid_v2", "hipDeviceGetUuid", 1, (void *, int))                                 \
    ENTRY(device_memory, "cuDeviceTotalMem_v2", "hipDeviceTotalMem", 1, (size_t *, int))                           \
    ENTRY(device_pci, "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId", 1, (char *, int, int))                        \
    ENTRY(device_properties, "", "hipGetDevicePropertiesR0600", 0, (void *, int))                                  \
    ENTRY(context_retain, "cuDevicePrimaryCtxRetain", "", 1, (u64 *, int))                                         \
    ENTRY(context_get, "cuCtxGetCurrent", "", 1, (u64 *))                                                          \
    ENTRY(context_set, "cuCtxSetCurrent", "", 1, (u64))                                                            \
    ENTRY(context_device, "cuCtxGetDevice", "hipGetDevice", 1, (int *))                                            \
    ENTRY(device_set, "", "hipSetDevice", 1, (int))                                                                \
    ENTRY(error_text, "cuGetErrorString", "", 1, (int, const char **))                                             \
    ENTRY(last_error, "", "hipGetLastError", 1, ())                                                                \
    ENTRY(mem_alloc, "cuMemAlloc_v2", "hipMalloc", 1, (u64 *, size_t))                                             \
    ENTRY(mem_free, "cuMemFree_v2", "hipFree", 1, (u64))                                                           \
    ENTRY(mem_info, "cuMemGetInfo_v2", "hipMemGetInfo", 1, (size_t *, size_t *))                                   \
    ENTRY(mem_range, "cuMemGetAddressRange_v2", "hipMemGetAddressRange", 1, (u64 *, size_t *, u64))                \
    ENTRY(memset, "cuMemsetD8Async", "hipMemsetD8Async", 1, (u64, unsigned char, size_t, u64))                     \
    ENTRY(memcpy, "cuMemcpyAsync", "", 1, (u64, u64, size_t, u64))                                                 \
    ENTRY(memcpy_kind, "", "hipMemcpyAsync", 1, (u64, u64, size_t, int, u64))                                      \
    ENTRY(memcpy_batch, "cuMemcpyBatchAsync_v2", "", 0,                                                            \
          (u64 *, u64 *, size_t *, size_t, lmc_copy_attributes *, size_t *, size_t, u64))                          \
    ENTRY(memcpy_batch_failing, "cuMemcpyBatchAsync", "", 0,                                                       \
          (u64 *, u64 *, size_t *, size_t, lmc_copy_attributes *, size_t *, size_t, size_t *, u64))                \
    ENTRY(host_register, "cuMemHostRegister_v2", "hipHostRegister", 1, (u64, size_t, unsigned int))                \
    ENTRY(host_unregister, "cuMemHostUnregister", "hipHostUnregister", 1, (u64))                                   \
    ENTRY(host_alloc, "cuMemHostAlloc", "hipHostMalloc", 1, (u64 *, size_t, unsigned int))                         \
    ENTRY(host_free, "cuMemFreeHost", "hipHostFree", 1, (u64))                                                     \
    ENTRY(stream_create, "cuStreamCreateWithPriority", "hipStreamCreateWithPriority", 1, (u64 *, unsigned int, int)) \
    ENTRY(stream_destroy, "cuStreamDestroy_v2", "hipStreamDestroy", 1, (u64))                                      \
    ENTRY(stream_synchronize, "cuStreamSynchronize", "hipStreamSynchronize", 1, (u64))                             \
    ENTRY(stream_query, "cuStreamQuery", "hipStreamQuery", 1, (u64))                                               \
    ENTRY(stream_wait_event, "cuStreamWaitEvent", "hipStreamWaitEvent", 1, (u64, u64, unsigned int))               \
    ENTRY(stream_priorities, "cuCtxGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange", 1, (int *, int *))  \
    ENTRY(stream_write, "cuStreamWriteValue64_v2", "hipStreamWriteValue64", 0, (u64, u64, u64, unsigned int))      \
    ENTRY(stream_wait, "cuStreamWaitValue64_v2", "", 0, (u64, u64, u64, unsigned int))                             \
    ENTRY(stream_wait_masked, "", "hipStreamWaitValue64", 0, (u64, u64, u64, unsigned int, u64))                   \
    ENTRY(stream_host, "cuLaunchHostFunc", "hipLaunchHostFunc", 1, (u64, void (*)(void *), void *))                \
    ENTRY(event_create, "cuEventCreate", "hipEventCreateWithFlags", 1, (u64 *, unsigned int))                      \
    ENTRY(event_destroy, "cuEventDestroy_v2", "hipEventDestroy", 1, (u64))                                         \
    ENTRY(event_record, "cuEventRecord", "hipEventRecord", 1, (u64, u64))                                          \
    ENTRY(event_query, "cuEventQuery", "hipEventQuery", 1, (u64))                                                  \
    ENTRY(event_synchronize, "cuEventSynchronize", "hipEventSynchronize", 1, (u64))                                \
    ENTRY(event_elapsed, "cuEventElapsedTime", "hipEventElapsedTime", 1, (float *, u64, u64))                      \
    ENTRY(event_export, "cuIpcGetEventHandle", "hipIpcGetEventHandle", 0, (lmc_handle64 *, u64))                   \
    ENTRY(event_open, "cuIpcOpenEventHandle", "hipIpcOpenEventHandle", 0, (u64 *, lmc_handle64))                   \
    ENTRY(ipc_export, "cuIpcGetMemHandle", "hipIpcGetMemHandle", 0, (lmc_handle64 *, u64))                         \
    ENTRY(ipc_open, "cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle", 0, (u64 *, lmc_handle64, unsigned int))        \
    ENTRY(ipc_close, "cuIpcCloseMemHandle", "hipIpcCloseMemHandle", 0, (u64))                                      \
    ENTRY(vmm_granularity, "cuMemGetAllocationGranularity", "hipMemGetAllocationGranularity", 0,                   \
          (size_t *, const lmc_allocation *, int))                                                                 \
    ENTRY(vmm_reserve, "cuMemAddressReserve", "hipMemAddressReserve", 0, (u64 *, size_t, size_t, u64, u64))        \
    ENTRY(vmm_unreserve, "cuMemAddressFree", "hipMemAddressFree", 0, (u64, size_t))                                \
    ENTRY(vmm_create, "cuMemCreate", "hipMemCreate", 0, (u64 *, size_t, const lmc_allocation *, u64))              \
    ENTRY(vmm_release, "cuMemRelease", "hipMemRelease", 0, (u64))                                                  \
    ENTRY(vmm_map, "cuMemMap", "hipMemMap", 0, (u64, size_t, size_t, u64, u64))                                    \
    ENTRY(vmm_unmap, "cuMemUnmap", "hipMemUnmap", 0, (u64, size_t))                                                \
    ENTRY(vmm_access, "cuMemSetAccess", "hipMemSetAccess", 0, (u64, size_t, const lmc_access *, size_t))           \
    ENTRY(vmm_export, "cuMemExportToShareableHandle", "hipMemExportToShareableHandle", 0, (void *, u64, int, u64)) \
    ENTRY(vmm_import, "cuMemImportFromShareableHandle", "hipMemImportFromShareableHandle", 0, (u64 *, void *, int)) \
    ENTRY(vmm_retain, "cuMemRetainAllocationHandle", "hipMemRetainAllocationHandle", 0, (u64 *, u64))              \
    ENTRY(module_load, "cuModuleLoadData", "hipModuleLoadData", 1, (u64 *, const void *))                          \
    ENTRY(module_function, "cuModuleGetFunction", "hipModuleGetFunction", 1, (u64 *, u64, const char *))           \
    ENTRY(launch, "cuLaunchKernel", "hipModuleLaunchKernel", 1,                                                    \
          (u64, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,  \
           u64, void **, void **))

// What both drivers number alike.
enum {
    LMC_SUCCESS = 0,
    LMC_OUT_OF_MEMORY = 2,
    LMC_NO_DEVICE = 100,
    LMC_INVALID_IMAGE = 200,
    LMC_NO_BINARY = 209,
    LMC_PTX_TOO_NEW = 222,
    LMC_NOT_READY = 600,
    LMC_HOST_ALREADY_REGISTERED = 712,
    LMC_NOT_SUPPORTED = 801,
};

#endif
