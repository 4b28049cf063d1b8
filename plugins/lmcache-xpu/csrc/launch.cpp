// The kernel of a context: the shipped SPIR-V, or what the runtime compiles of the source. And its launch.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "api.h"
#include "embedded.h"
#ifdef LMCACHE_XPU_AOT
#include <lmcache/kv_body.h>
#endif

namespace lmc {
namespace {

namespace syclex = sycl::ext::oneapi::experimental;

constexpr i64 kMostThreads = 256; // of a group
// Of a launch: more than any device runs at once, and far below 2^31, up to which kernels count by default.
constexpr i64 kMostItems = 1 << 22;

struct Loaded {
    sycl::context context;
    sycl::device device;
    std::string origin;
    sycl::kernel kernel;
};

// Leaked on purpose: the runtime may be gone when static objects are destroyed.
struct Kernels {
    std::mutex lock;
    std::vector<Loaded> loaded;
    std::string way;
};

Kernels &kernels()
{
    static Kernels *const all = new Kernels;
    return *all;
}

sycl::kernel_bundle<sycl::bundle_state::executable> from_source(const sycl::context &context,
                                                                const sycl::device &device)
{
    syclex::include_files headers;
    for (const auto &[name, text] : embedded_headers())
        headers.add(name, text);
    auto source = syclex::create_kernel_bundle_from_source(context, syclex::source_language::sycl, embedded_kernels(),
                                                           syclex::properties{headers});
    std::string log;
    try {
        return syclex::build(source, std::vector<sycl::device>{device}, syclex::properties{syclex::save_log{&log}});
    } catch (const sycl::exception &fault) {
        throw DeviceError(std::string("the kernel does not compile: ") + fault.what() + " " + log);
    }
}

Loaded load_spirv(const sycl::context &context, const sycl::device &device)
{
    const std::string image = embedded_spirv();
    std::vector<std::byte> bytes(image.size());
    std::memcpy(bytes.data(), image.data(), image.size());
    auto source = syclex::create_kernel_bundle_from_source(context, syclex::source_language::spirv, bytes);
    auto built = syclex::build(source, std::vector<sycl::device>{device});
    return {context, device, "spirv", built.ext_oneapi_get_kernel("__sycl_kernel_lmcache_move")};
}

Loaded load(const sycl::context &context, const sycl::device &device, const std::string &way)
{
    std::string why = "not tried";
    if (way != "source") {
        try {
            return load_spirv(context, device);
        } catch (const sycl::exception &fault) {
            why = fault.what();
        }
    }
    if (way == "spirv")
        throw DeviceError("the shipped SPIR-V does not load: " + why);
    try {
        return {context, device, "source", from_source(context, device).ext_oneapi_get_kernel("lmcache_move")};
    } catch (const std::exception &fault) {
        throw DeviceError("no kernel for " + device.get_info<sycl::info::device::name>() + ": SPIR-V: " + why +
                          "; source: " + fault.what());
    }
}

const Loaded *found(const sycl::queue &queue)
{
    for (const Loaded &one : kernels().loaded)
        if (one.context == queue.get_context() && one.device == queue.get_device())
            return &one;
    return nullptr;
}

sycl::kernel kernel_for(const sycl::queue &queue)
{
    const std::lock_guard<std::mutex> held(kernels().lock);
    if (const Loaded *one = found(queue))
        return one->kernel;
    kernels().loaded.push_back(load(queue.get_context(), queue.get_device(), kernels().way));
    return kernels().loaded.back().kernel;
}

// One group per id, layer and plane, and as many threads as have use. Where that were too many groups each takes
// several ids.
sycl::nd_range<3> grid_of(const lmc_transfer &transfer)
{
    const i64 vecs = static_cast<i64>(transfer.run / transfer.vec) * transfer.rows * transfer.heads;
    const i64 threads = std::min((vecs + 15) / 16 * 16, kMostThreads);
    const i64 layers = std::min<i64>(transfer.layers, 1024);
    const i64 most = std::max<i64>(1, kMostItems / (threads * layers * transfer.planes));
    const i64 units = std::min<i64>(transfer.units - transfer.skip, most);
    const auto size = [](i64 number) { return static_cast<size_t>(number); };
    return {{size(transfer.planes), size(layers), size(units * threads)}, {1, 1, size(threads)}};
}

} // namespace

std::string kernel_origin(u64 handle)
{
    const sycl::queue &queue = queue_of(handle);
#ifdef LMCACHE_XPU_AOT
    (void)queue;
    return "ahead";
#else
    const std::lock_guard<std::mutex> held(kernels().lock);
    const Loaded *one = found(queue);
    return one ? one->origin : "";
#endif
}

void kernels_from(const std::string &way)
{
    if (way != "" && way != "spirv" && way != "source")
        throw std::invalid_argument("kernels from '" + way + "': expected spirv, source or nothing");
    const std::lock_guard<std::mutex> held(kernels().lock);
    kernels().way = way;
    // A kernel is held by what is queued as well, so that this ends none that runs.
    kernels().loaded.clear();
}

std::string shipped_spirv() { return embedded_spirv(); }

std::string compile_spirv(u64 handle)
{
    const sycl::queue &queue = queue_of(handle);
    auto built = from_source(queue.get_context(), queue.get_device());
    for (const auto &image : built) {
        const std::vector<std::byte> bytes = image.ext_oneapi_get_backend_content();
        return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
    }
    throw DeviceError("the compiler made no image");
}

sycl::event launch_move(sycl::queue &queue, const lmc_transfer &transfer, const u64 *pages, const u64 *objects,
                        const i64 *ids)
{
    const sycl::nd_range<3> grid = grid_of(transfer);
#ifdef LMCACHE_XPU_AOT
    return queue.parallel_for(grid, [=](sycl::nd_item<3> at) {
        const lmc_grid here = {(int)at.get_group(2),       (int)at.get_group(1),       (int)at.get_group(0),
                               (int)at.get_local_id(2),    (int)at.get_group_range(2), (int)at.get_group_range(1),
                               (int)at.get_group_range(0), (int)at.get_local_range(2)};
        lmc_kv_transfer_body(transfer, pages, objects, ids, here);
    });
#else
    const sycl::kernel kernel = kernel_for(queue);
    return queue.submit([&](sycl::handler &group) {
        group.set_args(transfer, pages, objects, ids);
        group.parallel_for(grid, kernel);
    });
#endif
}

} // namespace lmc
