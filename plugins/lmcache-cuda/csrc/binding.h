// From Python's values to plain ones.
#ifndef LMCACHE_CUDA_BINDING_H
#define LMCACHE_CUDA_BINDING_H

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "api.h"

namespace lmc {

namespace py = pybind11;

typedef py::call_guard<py::gil_scoped_release> Released;

// An integer of 64 bits, signed or not.
inline u64 integer(py::handle value)
{
    const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!index)
        throw py::error_already_set();
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (!overflow)
        return static_cast<u64>(number);
    const unsigned long long large = PyLong_AsUnsignedLongLong(index.ptr());
    if (PyErr_Occurred())
        throw py::error_already_set();
    return large;
}

inline i64 signed_integer(py::handle value) { return static_cast<i64>(integer(value)); }

inline int small_integer(py::handle value, const char *what)
{
    const i64 number = signed_integer(value);
    if (number != static_cast<int>(number))
        throw std::invalid_argument(std::string(what) + " " + std::to_string(number) + ": expected 32 bits");
    return static_cast<int>(number);
}

// A sequence of integers, or a contiguous buffer of 64-bit ones.
std::vector<u64> integers(py::handle values);
Table table(py::handle values, i64 count);
lmc_shape_desc shape_of(py::handle numbers);          // eight integers
lmc_shape_desc shape_of_object(py::handle shape_desc); // attributes

template <typename T> std::vector<T> converted(const std::vector<u64> &values)
{
    return std::vector<T>(values.begin(), values.end());
}

void bind_transfers(py::module_ &m);

} // namespace lmc

#endif
