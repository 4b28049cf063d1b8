#include "binding.h"

#include <cstring>

namespace lmc {
namespace {

std::vector<u64> from_buffer(py::handle values)
{
    Py_buffer view;
    if (PyObject_GetBuffer(values.ptr(), &view, PyBUF_FORMAT | PyBUF_ND))
        throw py::error_already_set();
    const char *format = view.format ? view.format : "B";
    const bool fits = view.itemsize == 8 && view.ndim == 1 && std::strlen(format) == 1 && std::strchr("qQlL", *format);
    std::vector<u64> out;
    if (fits) {
        out.resize(static_cast<size_t>(view.len) / 8);
        if (view.len)
            std::memcpy(out.data(), view.buf, static_cast<size_t>(view.len));
    }
    const std::string got = format;
    PyBuffer_Release(&view);
    if (!fits)
        throw py::type_error("a buffer of '" + got + "': expected 64-bit integers, 1-D");
    return out;
}

} // namespace

std::vector<u64> integers(py::handle values)
{
    if (PyObject_CheckBuffer(values.ptr()))
        return from_buffer(values);
    const py::object list = py::reinterpret_steal<py::object>(
        PySequence_Fast(values.ptr(), "expected a sequence of integers, or a buffer of them"));
    if (!list)
        throw py::error_already_set();
    std::vector<u64> out;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(list.ptr());
    out.reserve(static_cast<size_t>(count));
    for (Py_ssize_t at = 0; at < count; ++at)
        out.push_back(integer(PySequence_Fast_GET_ITEM(list.ptr(), at)));
    return out;
}

Table table(py::handle values, i64 count)
{
    Table made;
    if (PyLong_Check(values.ptr())) {
        made.address = integer(values);
        made.count = count;
        if (!made.address && count > 0)
            throw std::invalid_argument("a table of " + std::to_string(count) + " values at address 0");
    } else {
        made.values = integers(values);
    }
    return made;
}

namespace {

int *const *fields_of(lmc_shape_desc &shape, int *(&fields)[8])
{
    int *all[] = {&shape.kv_size, &shape.nl, &shape.nb, &shape.bs,
                  &shape.nh, &shape.hs, &shape.element_size, &shape.block_stride_elems};
    std::memcpy(fields, all, sizeof all);
    return fields;
}

lmc_shape_desc new_shape()
{
    lmc_shape_desc shape = lmc_shape_desc();
    shape.size = sizeof shape;
    shape.version = LMC_STRUCT_VERSION;
    return shape;
}

} // namespace

lmc_shape_desc shape_of(py::handle numbers)
{
    const py::sequence given = py::reinterpret_borrow<py::sequence>(numbers);
    if (!PySequence_Check(numbers.ptr()) || given.size() != 8)
        throw py::type_error("shape: expected the eight numbers of PageBufferShapeDesc");
    lmc_shape_desc shape = new_shape();
    int *fields[8];
    fields_of(shape, fields);
    for (size_t at = 0; at < 8; ++at)
        *fields[at] = small_integer(given[at], "shape");
    return shape;
}

lmc_shape_desc shape_of_object(py::handle shape_desc)
{
    static const char *const names[] = {"kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems"};
    lmc_shape_desc shape = new_shape();
    int *fields[8];
    fields_of(shape, fields);
    for (size_t at = 0; at < 8; ++at)
        *fields[at] = small_integer(shape_desc.attr(names[at]), names[at]);
    return shape;
}

} // namespace lmc
