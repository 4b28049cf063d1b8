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
    const py::object list = py::reinterpret_steal<py::object>(
        PySequence_Fast(values.ptr(), "expected a sequence of integers, or a buffer of them"));
    if (!list)
        throw py::error_already_set();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(list.ptr());
    out.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t at = 0; at < count; ++at) {
        const py::object number =
            py::reinterpret_steal<py::object>(PyNumber_Index(PySequence_Fast_GET_ITEM(list.ptr(), at)));
        if (!number)
            throw py::error_already_set();
        const bool negative = number < py::int_(0);
        const u64 value = negative ? static_cast<u64>(PyLong_AsLongLong(number.ptr())) : PyLong_AsUnsignedLongLong(number.ptr());
        if (PyErr_Occurred())
            throw py::error_already_set();
        out.push_back(value);
    }
    return out;
}

template <bool ToStage>
void rows_of_python(u64 stage, py::handle addresses, i64 pieces, i64 piece_bytes, i64 stride, int threads)
{
    const Rows rows = {stage, pieces, piece_bytes, stride};
    check(ToStage ? "gather" : "scatter", rows);
    const std::vector<u64> places = integers(addresses);
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
    for (std::size_t at = 0; at < bytes.size(); ++at) {
        const std::string copy = "batched_memcpy: copy " + std::to_string(at) + ": ";
        if (static_cast<i64>(bytes[at]) < 0)
            throw std::invalid_argument(copy + "size " + std::to_string(static_cast<i64>(bytes[at])) +
                                        ": expected 0 or more");
        for (const u64 address : {from[at], to[at]})
            if (bytes[at] && (static_cast<i64>(address) <= 0 || address > UINT64_MAX - bytes[at]))
                throw std::invalid_argument(copy + std::to_string(bytes[at]) + " bytes at address " +
                                            std::to_string(static_cast<i64>(address)) + ": no such memory");
    }
    py::gil_scoped_release free;
    copy_each(from, to, bytes);
}

inline void bind(py::module_ &m)
{
    py::class_<Buffer>(m, "HostBuffer", py::buffer_protocol())
        .def(py::init<std::size_t, bool>(), py::arg("nbytes"), py::arg("lock") = true)
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
    m.def("alloc_pinned_ptr", [](i64 size, i64) { return pinned->alloc(size); }, py::arg("size"),
          py::arg("device_id") = 0);
    m.def("free_pinned_ptr", [](u64 ptr) { pinned->free(ptr); }, py::arg("ptr"));
}

} // namespace lmchost

#endif
