// What the parts of the module share. Queues are handles of sycl::queue as torch gives them; all else is integers.
#ifndef LMCACHE_XPU_API_H
#define LMCACHE_XPU_API_H

#include <stdexcept>
#include <string>
#include <vector>

#include <lmcache/transfer.h>
#include <sycl/sycl.hpp>

namespace lmc {

typedef lmc_u64 u64;
typedef lmc_i64 i64;

// A layout that is not served, or operands that do not fit it.
struct LayoutError : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// What the device or its runtime refuses.
struct DeviceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// --- queues.cpp: everything of the SYCL runtime but kernels ---------------------------------------------------

// The queue behind a handle: one that keeps the order of what is submitted to it.
sycl::queue &queue_of(u64 handle);
u64 queue_create(int device, bool in_order); // on a device of any kind by its index, for who has no torch.xpu
void queue_destroy(u64 handle);
void queue_wait(u64 handle);
bool queue_is_idle(u64 handle);
std::string queue_device(u64 handle);
std::vector<std::string> devices();

// USM of the queue's context. `kind` is "host", "device" or "shared".
u64 usm_alloc(u64 handle, i64 bytes, const std::string &kind);
void usm_free(u64 address); // once, and only what usm_alloc gave
// What memory an address is: one of these kinds, or "unknown" for what is not the runtime's.
std::string usm_kind(u64 handle, u64 address);

void copy_async(u64 handle, u64 to, u64 from, i64 bytes);

// Keep the queue busy until `release` of the answer, or for so many seconds at most.
u64 stall(u64 handle, double seconds);
void release(u64 ticket);

// A mark at the present end of the queue; `passed` takes those that the queues are past, in no order.
u64 mark(u64 handle);
std::vector<u64> passed();

// --- records.cpp ---------------------------------------------------------------------------------------------

struct Record {
    std::string kind, payload;
    double seconds; // since 1970
};

// Have it drained from this channel once all that is on the queue is done.
void record(u64 handle, int channel, std::string kind, std::string payload);
std::vector<Record> drain(int channel);

// --- launch.cpp ----------------------------------------------------------------------------------------------

// Where the kernel of a context came from: "ahead" of all where icpx built the module, "spirv", "source", or "" before
// it is needed.
std::string kernel_origin(u64 handle);
sycl::event launch_move(sycl::queue &queue, const lmc_transfer &transfer, const u64 *pages, const u64 *objects,
                        const i64 *ids);
// The SPIR-V that the runtime's compiler makes of the source in this module.
std::string compile_spirv(u64 handle);
std::string shipped_spirv();
// For tests: "" as always, "spirv" and "source" one way only. Contexts that have a kernel keep it.
void kernels_from(const std::string &way);

// --- transfers.cpp -------------------------------------------------------------------------------------------

// Integers on the host, or the address of `count` of them that the device can read.
struct Table {
    std::vector<u64> values;
    u64 address = 0;
    i64 count = 0;

    i64 size() const { return address ? count : static_cast<i64>(values.size()); }
};

struct TransferCall {
    std::string op;
    u64 queue;
    int format, direction;
    lmc_shape_desc shape;
    Table pages, ids;
    std::vector<u64> objects;
    i64 object_slots, skip;
    bool by_slot, token_major;
    std::vector<int> widths; // of the planes of a layer, where each has its own; none otherwise
    int plane;               // which of them is moved
};

void transfer(const TransferCall &call);

i64 count_tables(); // of tables.cpp

} // namespace lmc

#endif
