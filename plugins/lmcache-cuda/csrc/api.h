// What the binding calls, in plain types. `device` -1: see Current.
#ifndef LMCACHE_CUDA_API_H
#define LMCACHE_CUDA_API_H

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "driver.h"

namespace lmc {

typedef lmc_i64 i64;

// --- device.cpp
int device_count();
struct DeviceInfo {
    std::string uuid, name, pci_bus_id, arch;
    int major, minor;
    u64 total_memory;
    bool vmm, fd_handles, mem_ops, host_register, integrated;
};
DeviceInfo device_info(int ordinal);
bool vmm_supported(int device);

// --- memory.cpp
u64 mem_alloc(int device, u64 nbytes);
void mem_free(int device, u64 ptr);
std::pair<u64, u64> mem_info(int device);
std::pair<u64, u64> address_range(u64 ptr, int device);
void memset_async(u64 ptr, int value, u64 nbytes, u64 stream, int device);
void memcpy_async(u64 dst, u64 src, u64 nbytes, u64 stream, int device);
void memcpy_split_async(u64 dst, u64 src, u64 nbytes, u64 host_offset, u64 alignment, int direction, u64 stream,
                        int device);
bool batch_memcpy_native();
void memcpy_batch_async(std::vector<u64> dsts, std::vector<u64> srcs, std::vector<size_t> sizes, u64 stream,
                        int device);
void host_register(u64 ptr, u64 nbytes, unsigned int flags, int device);
void host_unregister(u64 ptr, int device);
u64 host_alloc(u64 nbytes, unsigned int flags, int device);
void host_free(u64 ptr, int device);

// Copies that have been looked at and are to be queued; what is cut has a host side.
struct Copy {
    u64 to, from, nbytes;
};
void check_alignment(u64 alignment);
void cut_copy(std::vector<Copy> &out, u64 dst, u64 src, u64 nbytes, u64 host_offset, u64 alignment);
void queue_copy(const Copy &copy, u64 stream);
void queue_batch(const std::vector<Copy> &copies, u64 stream);

// --- shared.cpp
std::tuple<std::string, u64, u64> ipc_export(u64 ptr, int device);
u64 ipc_open(int device, const std::string &handle);
void ipc_close(int device, u64 base);
u64 vmm_alloc(int device, u64 nbytes);
std::tuple<int, u64, u64> vmm_export_fd(u64 ptr, int device);
u64 vmm_import_fd(int device, int fd, u64 nbytes);
void vmm_free(int device, u64 ptr);
lmc_handle64 handle_of(const std::string &bytes);

// --- streams.cpp
u64 stream_create(int device, int priority);
void stream_destroy(u64 stream, int device);
void stream_synchronize(u64 stream, int device);
bool stream_query(u64 stream, int device);
void stream_wait_event(u64 stream, u64 event, int device);
std::pair<int, int> stream_priority_range(int device);
u64 event_create(int device, bool interprocess, bool timing);
void event_destroy(u64 event, int device);
void event_record(u64 event, u64 stream, int device);
bool event_query(u64 event, int device);
void event_synchronize(u64 event, int device);
double event_elapsed_ms(u64 start, u64 end, int device);
std::string event_export(u64 event, int device);
u64 event_open(int device, const std::string &handle);
void stream_write_u64(u64 stream, u64 address, u64 value, int device);
void stream_wait_u64_geq(u64 stream, u64 address, u64 value, int device);

// --- records.cpp
struct Completion {
    std::string kind, payload;
};
struct Event {
    std::string type, session;
    double time;
    std::map<std::string, std::string> texts;
    std::map<std::string, i64> numbers;
};
void record_completion(u64 stream, Completion &&completion, int device);
std::vector<Completion> drain_completions();
void record_event(u64 stream, Event &&event, int device);
std::vector<Event> drain_events();
u64 dropped_events();
double wall_clock();

// --- transfers.cpp
struct Table {           // integers in device memory, or here
    u64 address = 0;
    i64 count = -1;      // -1: not said
    std::vector<u64> values;
    i64 size() const { return address ? count : static_cast<i64>(values.size()); }
};
struct TransferCall {
    const char *op;
    int format = 0, direction = 0, device = 0;
    u64 stream = 0;
    lmc_shape_desc shape;
    Table pages, ids;
    std::vector<u64> objects;
    i64 object_slots = 0, skip = 0;
    u64 page_alignment = 0;
    bool by_slot = false, token_major = false;
    int plane = 0;
    std::vector<int> widths;
};
struct Planned { // what was checked, and is to be launched
    lmc_transfer transfer;
    Table pages, ids;
    std::vector<u64> objects;
};
void check_answer(const char *op, int format, int answer);
lmc_layout layout_of(const TransferCall &call);
Planned plan_transfer(const TransferCall &call);
void queue_transfer(const Planned &planned, u64 stream, const Current &on);
void transfer(const TransferCall &call);

// --- plans.cpp
struct Staging {
    u64 dest, src, nbytes, host_offset;
};
struct Launch {
    i64 group, offset, blocks, objects, skip;
};
struct Group {
    u64 pages;
    std::vector<u64> objects;
    lmc_shape_desc shape;
    i64 chunk_size;
    int format;
    u64 ids;
    i64 ids_capacity;
    u64 page_alignment;
};
struct Step {
    std::vector<Staging> staging;
    std::vector<Launch> launches;
};
struct PlanCall {
    int direction, device;
    u64 stream, host_alignment;
    std::vector<Group> groups;
    std::vector<Step> steps;
    bool timed;
    std::string session;
};
void execute_plan(const PlanCall &call);
struct Timing {
    int phase, direction, device;
    double milliseconds;
    u64 nbytes;
    std::string session;
    double start, end;
};
std::vector<Timing> pop_timings();

struct DirectGroup {
    std::vector<u64> pages;
    lmc_shape_desc shape;
    int format;
    i64 slots_per_chunk, offset;
    std::vector<i64> ids;
};
struct DirectObject {
    u64 host, host_offset, nbytes;
    i64 chunk;
    std::vector<i64> skips;
};
struct DirectCall {
    int direction, device;
    u64 stream, host_alignment;
    std::vector<DirectGroup> groups;
    std::vector<DirectObject> objects;
};
void execute_direct(const DirectCall &call);
bool direct_format(int format);

// --- codec.cpp
void copy_kernel(u64 dst, u64 src, u64 nbytes, u64 stream, int device);
void rotate(const lmc_rotate &parameters, u64 stream, int device);
void cachegen(Kernel kernel, const lmc_cachegen &parameters, u64 stream, int device);

} // namespace lmc

#endif
