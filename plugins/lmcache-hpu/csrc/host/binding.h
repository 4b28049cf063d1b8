// The same for Python: addresses and sizes are integers, and other threads run meanwhile.
#ifndef LMCACHE_HOST_BINDING_H
#define LMCACHE_HOST_BINDING_H

#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

#include "buffer.h"
#include "copies.h"

namespace lmchost {

namespace py = pybind11;

// An integer of 64 bits, with a sign or without.
inline u64 integer(py::handle value)
{
    const py::object number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!number)
        throw py::error_already_set();
    int overflow = 0;
    const long long with_sign = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (!overflow)
        return static_cast<u64>(with_sign);
    if (overflow > 0) {
        const unsigned long long without = PyLong_AsUnsignedLongLong(number.ptr());
        if (!PyErr_Occurred())
            return without;
        PyErr_Clear();
    }
    throw std::invalid_argument(std::string(py::str(number)) + ": expected an integer of 64 bits");
}

// Integers of a sequence, or of a contiguous buffer of 64-bit integers.
inline std::vector<u64> integers(py::handle values)
{
    std::vector<u64> out;
    if (PyObject_CheckBuffer(values.ptr())) {
        const py::buffer_info view = py::reinterpret_borrow<py::buffer>(values).request();
        if (view.itemsize != 8 || view.ndim != 1 || view.format.size() != 1 || !std::strchr("qQlL", view.format[0]) ||
            (view.size > 1 && view.strides[0] != 8))
            throw py::type_error("a buffer of '" + view.format + "': expected contiguous 64-bit integers, 1-D");
        const auto *first = static_cast<const u64 *>(view.ptr);
        out.assign(first, first + view.size);
        return out;
    }
    // A tuple of its own: an item's __index__ may change the list that it is in.
    const py::object items = py::reinterpret_steal<py::object>(PySequence_Tuple(values.ptr()));
    if (!items)
        throw py::error_already_set();
    out.reserve(static_cast<std::size_t>(PyTuple_GET_SIZE(items.ptr())));
    for (const py::handle item : py::reinterpret_borrow<py::tuple>(items))
        out.push_back(integer(item));
    return out;
}

template <bool ToStage>
void rows_of_python(u64 stage, py::handle addresses, i64 pieces, i64 piece_bytes, i64 stride, int threads)
{
    const Rows rows = {stage, pieces, piece_bytes, stride};
    const std::vector<u64> places = integers(addresses);
    check(ToStage ? "gather" : "scatter", rows, places);
    py::gil_scoped_release free;
    move_rows<ToStage>(rows, places, threads);
}

inline void batched_memcpy(py::handle src, py::handle dst, py::handle sizes)
{
    const std::vector<u64> from = integers(src), to = integers(dst), bytes = integers(sizes);
    if (from.size() != to.size() || from.size() != bytes.size())
        throw std::invalid_argument("batched_memcpy: " + std::to_string(from.size()) + " src, " +
                                    std::to_string(to.size()) + " dst, " + std::to_string(bytes.size()) +
                                    " sizes: expected as many of each");
    u64 total = 0;
    for (std::size_t at = 0; at < bytes.size(); ++at) {
        const std::string copy = "batched_memcpy: copy " + std::to_string(at) + ": ";
        if (static_cast<i64>(bytes[at]) < 0)
            throw std::invalid_argument(copy + "size " + std::to_string(static_cast<i64>(bytes[at])) +
                                        ": expected 0 or more");
        for (const u64 address : {from[at], to[at]})
            if (bytes[at] && !can_be_memory(address, bytes[at]))
                throw std::invalid_argument(copy + std::to_string(bytes[at]) + " bytes at address " +
                                            std::to_string(static_cast<i64>(address)) + ": no such memory");
        total += bytes[at];
        if (total > static_cast<u64>(INT64_MAX))
            throw std::invalid_argument(copy + "size " + std::to_string(bytes[at]) +
                                        ": expected all sizes together within 63 bits");
    }
    py::gil_scoped_release free;
    copy_each(from, to, bytes);
}

inline void bind(py::module_ &m)
{
    // Of this module alone: another wheel that ships this text may be in the process, too.
    py::class_<Buffer>(m, "HostBuffer", py::module_local(), py::buffer_protocol())
        .def(py::init<std::size_t, bool>(), py::arg("nbytes"), py::arg("lock") = true,
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("address", &Buffer::address)
        .def_property_readonly("nbytes", &Buffer::bytes)
        .def_property_readonly("locked", &Buffer::locked)
        .def_buffer([](Buffer &one) {
            return py::buffer_info(reinterpret_cast<unsigned char *>(one.address()), static_cast<py::ssize_t>(one.bytes()));
        });
    m.attr("HOST_ALIGNMENT") = kAlignment;
    m.def("gather", &rows_of_python<true>, py::arg("stage"), py::arg("addresses"), py::arg("pieces"),
          py::arg("piece_bytes"), py::arg("stride"), py::arg("threads") = 0);
    m.def("scatter", &rows_of_python<false>, py::arg("stage"), py::arg("addresses"), py::arg("pieces"),
          py::arg("piece_bytes"), py::arg("stride"), py::arg("threads") = 0);
    m.def("batched_memcpy", &batched_memcpy, py::arg("src"), py::arg("dst"), py::arg("sizes"));
    // Never destroyed: another thread may still free what it has when the process ends.
    static Allocations *const pinned = new Allocations;
    m.def("alloc_pinned_ptr", [](i64 size, i64) {
        if (size < 1)
            throw std::invalid_argument("alloc_pinned_ptr: size=" + std::to_string(size) + ": expected 1 byte or more");
        std::unique_ptr<Buffer> made;
        {
            const py::gil_scoped_release free; // locking what is large takes seconds
            made = std::make_unique<Buffer>(static_cast<std::size_t>(size), true);
        }
        return pinned->keep(std::move(made));
    }, py::arg("size"), py::arg("device_id") = 0);
    m.def("free_pinned_ptr", [](u64 ptr) {
        std::unique_ptr<Buffer> taken = pinned->take(ptr); // known to nobody before it is gone
        const py::gil_scoped_release free;
        taken.reset();
    }, py::arg("ptr"));
}

} // namespace lmchost

#endif
