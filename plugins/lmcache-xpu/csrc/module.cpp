// The module: integers in, integers out. Nothing of torch, nothing of Python behind this file.
#include <climits>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "api.h"

namespace py = pybind11;

namespace {

typedef py::call_guard<py::gil_scoped_release> Released;

// An integer of 64 bits, with a sign or without: addresses of device memory may have the highest bit set, and come
// from int64 tensors as negative numbers.
lmc::u64 integer(py::handle value)
{
    const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!index)
        throw py::error_already_set();
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (!overflow)
        return static_cast<lmc::u64>(number);
    if (overflow > 0) {
        const unsigned long long large = PyLong_AsUnsignedLongLong(index.ptr());
        if (!PyErr_Occurred())
            return large;
        PyErr_Clear();
    }
    throw std::invalid_argument(std::string(py::str(index)) + ": expected an integer of 64 bits");
}

std::vector<lmc::u64> integers(py::handle values)
{
    // A tuple of its own: an item's __index__ may change the list that it is in.
    const py::object items = py::reinterpret_steal<py::object>(PySequence_Tuple(values.ptr()));
    if (!items)
        throw py::error_already_set();
    std::vector<lmc::u64> out;
    for (const py::handle one : py::reinterpret_borrow<py::tuple>(items))
        out.push_back(integer(one));
    return out;
}

// A list of values, or (address, count) of what the device can read.
lmc::Table table(py::handle values)
{
    lmc::Table made;
    if (!py::isinstance<py::tuple>(values)) {
        made.values = integers(values);
        return made;
    }
    const py::tuple pair = py::reinterpret_borrow<py::tuple>(values);
    if (pair.size() != 2)
        throw py::type_error("a table: expected a list of integers, or a tuple of an address and a count");
    made.address = integer(pair[0]);
    made.count = static_cast<lmc::i64>(integer(pair[1]));
    if (made.count < 0 || (!made.address && made.count))
        throw std::invalid_argument("a table of " + std::to_string(made.count) + " values at address " +
                                    std::to_string(made.address) + ": no such memory");
    return made;
}

lmc_shape_desc shape_of(py::handle given)
{
    const std::vector<lmc::u64> numbers = integers(given);
    if (numbers.size() != 8)
        throw py::type_error("shape: expected the eight numbers of PageBufferShapeDesc");
    lmc_shape_desc shape = LMC_INIT(lmc_shape_desc);
    int *const fields[] = {&shape.kv_size, &shape.nl, &shape.nb, &shape.bs,
                           &shape.nh, &shape.hs, &shape.element_size, &shape.block_stride_elems};
    for (size_t at = 0; at < 8; ++at) {
        const auto number = static_cast<lmc::i64>(numbers[at]);
        if (number < INT_MIN || number > INT_MAX)
            throw std::invalid_argument("shape: " + std::to_string(number) + ": expected a number of 32 bits");
        *fields[at] = static_cast<int>(number);
    }
    return shape;
}

void transfer(const std::string &op, lmc::u64 queue, int format, int direction, const py::object &shape,
              const py::object &pages, const py::object &objects, const py::object &ids,
              lmc::i64 object_slots, lmc::i64 skip, bool by_slot, bool token_major, const std::vector<int> &widths,
              int plane)
{
    const lmc::TransferCall call = {op,      queue,        format, direction, shape_of(shape), table(pages), table(ids),
                                    integers(objects), object_slots, skip, by_slot, token_major, widths, plane};
    const py::gil_scoped_release released;
    lmc::transfer(call);
}

py::list drained(int channel)
{
    py::list out;
    for (const lmc::Record &one : lmc::drain(channel))
        out.append(py::make_tuple(one.kind, py::bytes(one.payload), one.seconds));
    return out;
}

// Python's classes for our errors; leaked on purpose, as they are wanted until the process ends.
PyObject *device_error = nullptr, *layout_error = nullptr;

void set_errors(const py::object &device, const py::object &layout)
{
    device_error = py::object(device).release().ptr();
    layout_error = py::object(layout).release().ptr();
}

void translate(std::exception_ptr fault)
{
    try {
        std::rethrow_exception(fault);
    } catch (const lmc::LayoutError &error) {
        PyErr_SetString(layout_error ? layout_error : PyExc_ValueError, error.what());
    } catch (const lmc::DeviceError &error) {
        PyErr_SetString(device_error ? device_error : PyExc_RuntimeError, error.what());
    }
}

} // namespace

PYBIND11_MODULE(_native, m)
{
    m.doc() = "Kernels and copies on SYCL queues.";
    m.attr("LMCACHE_NATIVE_ABI") = LMCACHE_NATIVE_ABI;
    m.attr("SYCL_MAJOR") = __LIBSYCL_MAJOR_VERSION;
    py::register_exception_translator(translate);
    m.def("set_errors", set_errors, py::arg("device"), py::arg("layout"));

    m.def("devices", lmc::devices, Released());
    m.def("queue_create", lmc::queue_create, py::arg("device") = 0, py::arg("in_order") = true, Released());
    m.def("queue_destroy", lmc::queue_destroy, py::arg("queue"), Released());
    m.def("queue_wait", lmc::queue_wait, py::arg("queue"), Released());
    m.def("queue_is_idle", lmc::queue_is_idle, py::arg("queue"), Released());
    m.def("queue_device", lmc::queue_device, py::arg("queue"), Released());
    m.def("usm_alloc", lmc::usm_alloc, py::arg("queue"), py::arg("bytes"), py::arg("kind"), Released());
    m.def("usm_free", lmc::usm_free, py::arg("address"), Released());
    m.def("usm_kind", lmc::usm_kind, py::arg("queue"), py::arg("address"), Released());
    m.def("copy_async", [](lmc::u64 queue, const py::object &to, const py::object &source, lmc::i64 bytes) {
        const lmc::u64 target = integer(to), from = integer(source);
        const py::gil_scoped_release released;
        lmc::copy_async(queue, target, from, bytes);
    }, py::arg("queue"), py::arg("to"), py::arg("source"), py::arg("bytes"));
    m.def("transfer", transfer, py::arg("op"), py::arg("queue"), py::arg("format"), py::arg("direction"),
          py::arg("shape"), py::arg("pages"), py::arg("objects"), py::arg("ids"), py::arg("object_slots"),
          py::arg("skip") = 0, py::arg("by_slot") = false, py::arg("token_major") = false,
          py::arg("widths") = std::vector<int>(), py::arg("plane") = 0);
    m.def("record", [](lmc::u64 queue, int channel, const std::string &kind, const py::bytes &payload) {
        std::string bytes = payload;
        const py::gil_scoped_release released;
        lmc::record(queue, channel, kind, std::move(bytes));
    }, py::arg("queue"), py::arg("channel"), py::arg("kind"), py::arg("payload"));
    m.def("drain", drained, py::arg("channel"));

    m.def("mark", lmc::mark, py::arg("queue"), Released());
    m.def("passed", lmc::passed, Released());
    m.def("stall", lmc::stall, py::arg("queue"), py::arg("seconds"), Released());
    m.def("release", lmc::release, py::arg("ticket"), Released());

    m.def("kernel_origin", lmc::kernel_origin, py::arg("queue"), Released());
    m.def("kernels_from", lmc::kernels_from, py::arg("way"), Released());
    m.def("compile_spirv", [](lmc::u64 queue) { return py::bytes(lmc::compile_spirv(queue)); }, py::arg("queue"));
    m.def("shipped_spirv", [] { return py::bytes(lmc::shipped_spirv()); });
    m.def("count_tables", lmc::count_tables, Released());
}
