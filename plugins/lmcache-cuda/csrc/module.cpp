// lmcache_cuda._native: the driver's functions as Python calls them. src/lmcache_cuda/_native.pyi documents all.
#include "binding.h"

namespace lmc {
namespace {

// Classes of set_error_type; owned, and never given back: they may be raised until the process is gone.
PyObject *device_error = nullptr;
PyObject *layout_error = nullptr;

void replace(PyObject *&which, py::handle given)
{
    if (!PyExceptionClass_Check(given.ptr()))
        throw py::type_error("set_error_type: expected a class of exceptions");
    Py_XDECREF(which);
    which = given.inc_ref().ptr();
}

void set_error_type(py::object device, py::object layout)
{
    replace(device_error, device);
    if (!layout.is_none())
        replace(layout_error, layout);
}

void raise(const DriverError &error)
{
    const py::handle type = device_error ? device_error : PyExc_RuntimeError;
    const py::object made = type(error.what());
    made.attr("code") = error.code;
    made.attr("call") = error.call;
    PyErr_SetObject(type.ptr(), made.ptr());
}

void translate(std::exception_ptr thrown)
{
    try {
        std::rethrow_exception(thrown);
    } catch (const DriverError &error) {
        raise(error);
    } catch (const LayoutError &error) {
        PyErr_SetString(layout_error ? layout_error : PyExc_ValueError, error.what());
    }
}

py::dict info(int ordinal)
{
    DeviceInfo it;
    {
        const py::gil_scoped_release released;
        it = device_info(ordinal);
    }
    using namespace py::literals;
    return py::dict("uuid"_a = py::bytes(it.uuid), "name"_a = it.name, "pci_bus_id"_a = it.pci_bus_id,
                    "capability"_a = py::make_tuple(it.major, it.minor), "arch"_a = it.arch,
                    "total_memory"_a = it.total_memory, "vmm"_a = it.vmm, "fd_handles"_a = it.fd_handles,
                    "mem_ops"_a = it.mem_ops, "host_register"_a = it.host_register, "integrated"_a = it.integrated);
}

void bind_driver(py::module_ &m)
{
    using namespace py::literals;
    m.attr("LMCACHE_NATIVE_ABI") = LMCACHE_NATIVE_ABI;
    m.attr("IMAGES") = py::dict("cuda"_a = image(kCuda).architectures, "rocm"_a = image(kRocm).architectures);
    m.attr("IMAGE_DRIVER_VERSION") = image(kCuda).driver_version;
    m.def("use", use, "kind"_a);
    m.def("set_error_type", set_error_type, "device"_a, "layout"_a = py::none());
    m.def("driver_path", [] { return driver().path; }, Released());
    m.def("driver_version", [] { return driver().version; }, Released());
    m.def("device_count", device_count, Released());
    m.def("device_info", info, "ordinal"_a);
    m.def("current_device", current_device, Released());
    m.def("vmm_supported", vmm_supported, "device"_a, Released());
}

void bind_memory(py::module_ &m)
{
    using namespace py::literals;
    m.def("mem_alloc", mem_alloc, "device"_a, "nbytes"_a, Released());
    m.def("mem_free", mem_free, "device"_a, "ptr"_a, Released());
    m.def("mem_info", mem_info, "device"_a, Released());
    m.def("address_range", address_range, "ptr"_a, "device"_a = -1, Released());
    m.def("memset_async", memset_async, "ptr"_a, "value"_a, "nbytes"_a, "stream"_a, "device"_a, Released());
    m.def("memcpy_async", memcpy_async, "dst"_a, "src"_a, "nbytes"_a, "stream"_a, "device"_a, Released());
    m.def("memcpy_split_async", memcpy_split_async, "dst"_a, "src"_a, "nbytes"_a, "host_offset"_a, "alignment"_a,
          "direction"_a, "stream"_a, "device"_a, Released());
    m.def(
        "memcpy_batch_async",
        [](py::object dsts, py::object srcs, py::object sizes, u64 stream, int device) {
            std::vector<u64> to = integers(dsts), from = integers(srcs);
            std::vector<size_t> bytes = converted<size_t>(integers(sizes));
            const py::gil_scoped_release released;
            memcpy_batch_async(std::move(to), std::move(from), std::move(bytes), stream, device);
        },
        "dsts"_a, "srcs"_a, "sizes"_a, "stream"_a, "device"_a);
    m.def("batch_memcpy_native", batch_memcpy_native, Released());
    m.def("host_register", host_register, "ptr"_a, "nbytes"_a, "flags"_a = 0u, "device"_a = -1, Released());
    m.def("host_unregister", host_unregister, "ptr"_a, "device"_a = -1, Released());
    m.def("host_alloc", host_alloc, "nbytes"_a, "flags"_a = 0u, "device"_a = -1, Released());
    m.def("host_free", host_free, "ptr"_a, "device"_a = -1, Released());
}

void bind_shared(py::module_ &m)
{
    using namespace py::literals;
    m.def(
        "ipc_export",
        [](u64 ptr, int device) {
            std::tuple<std::string, u64, u64> made;
            {
                const py::gil_scoped_release released;
                made = ipc_export(ptr, device);
            }
            return py::make_tuple(py::bytes(std::get<0>(made)), std::get<1>(made), std::get<2>(made));
        },
        "ptr"_a, "device"_a = -1);
    m.def("ipc_open", [](int device, const py::bytes &handle) {
        const std::string given = handle;
        const py::gil_scoped_release released;
        return ipc_open(device, given);
    }, "device"_a, "handle"_a);
    m.def("ipc_close", ipc_close, "device"_a, "base"_a, Released());
    m.def("vmm_alloc", vmm_alloc, "device"_a, "nbytes"_a, Released());
    m.def("vmm_export_fd", vmm_export_fd, "ptr"_a, "device"_a = -1, Released());
    m.def("vmm_import_fd", vmm_import_fd, "device"_a, "fd"_a, "nbytes"_a, Released());
    m.def("vmm_free", vmm_free, "device"_a, "ptr"_a, Released());
}

void bind_streams(py::module_ &m)
{
    using namespace py::literals;
    m.def("stream_create", stream_create, "device"_a, "priority"_a = 0, Released());
    m.def("stream_destroy", stream_destroy, "stream"_a, "device"_a = -1, Released());
    m.def("stream_synchronize", stream_synchronize, "stream"_a, "device"_a = -1, Released());
    m.def("stream_query", stream_query, "stream"_a, "device"_a = -1, Released());
    m.def("stream_wait_event", stream_wait_event, "stream"_a, "event"_a, "device"_a = -1, Released());
    m.def("stream_priority_range", stream_priority_range, "device"_a, Released());
    m.def("event_create", event_create, "device"_a, "interprocess"_a = false, "timing"_a = false, Released());
    m.def("event_destroy", event_destroy, "event"_a, "device"_a = -1, Released());
    m.def("event_record", event_record, "event"_a, "stream"_a, "device"_a = -1, Released());
    m.def("event_query", event_query, "event"_a, "device"_a = -1, Released());
    m.def("event_synchronize", event_synchronize, "event"_a, "device"_a = -1, Released());
    m.def("event_elapsed_ms", event_elapsed_ms, "start"_a, "end"_a, "device"_a = -1, Released());
    m.def("event_export", [](u64 event, int device) {
        std::string made;
        {
            const py::gil_scoped_release released;
            made = event_export(event, device);
        }
        return py::bytes(made);
    }, "event"_a, "device"_a = -1);
    m.def("event_open", [](int device, const py::bytes &handle) {
        const std::string given = handle;
        const py::gil_scoped_release released;
        return event_open(device, given);
    }, "device"_a, "handle"_a);
    m.def("stream_write_u64", stream_write_u64, "stream"_a, "address"_a, "value"_a, "device"_a = -1, Released());
    m.def("stream_wait_u64_geq", stream_wait_u64_geq, "stream"_a, "address"_a, "value"_a, "device"_a = -1, Released());
}

void bind_records(py::module_ &m)
{
    using namespace py::literals;
    m.def("record_completion_on_stream", [](u64 stream, const py::str &kind, const py::bytes &payload, int device) {
        Completion made = {kind, payload};
        const py::gil_scoped_release released;
        record_completion(stream, std::move(made), device);
    }, "stream"_a, "kind"_a, "payload"_a, "device"_a = -1);
    m.def("drain_recorded_completions", [] {
        py::list made;
        for (const Completion &at : drain_completions())
            made.append(py::make_tuple(at.kind, py::bytes(at.payload)));
        return made;
    });
    m.def("record_event_on_stream", [](u64 stream, const py::str &type, const py::str &session,
                                       std::map<std::string, std::string> texts, std::map<std::string, i64> numbers,
                                       int device) {
        Event made = {type, session, 0, std::move(texts), std::move(numbers)};
        const py::gil_scoped_release released;
        record_event(stream, std::move(made), device);
    }, "stream"_a, "type"_a, "session"_a, "texts"_a, "numbers"_a, "device"_a = -1);
    m.def("drain_recorded_events", [] {
        py::list made;
        for (const Event &at : drain_events())
            made.append(py::make_tuple(at.type, at.session, at.time, at.texts, at.numbers));
        return made;
    });
    m.def("dropped_events", dropped_events, Released());
}

} // namespace
} // namespace lmc

PYBIND11_MODULE(_native, m)
{
    m.doc() = "LMCache on the driver API of CUDA and HIP; see _native.pyi.";
    lmc::py::register_local_exception_translator(lmc::translate);
    lmc::bind_driver(m);
    lmc::bind_memory(m);
    lmc::bind_shared(m);
    lmc::bind_streams(m);
    lmc::bind_records(m);
    lmc::bind_transfers(m);
}
