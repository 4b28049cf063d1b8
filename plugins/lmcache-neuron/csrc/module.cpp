// lmcache_neuron._native: host staging, and the Neuron runtime's reads and writes, which it does not link.
#include "host/binding.h"
#include "nrt.h"

#include <lmcache/abi.h>

namespace py = pybind11;
using lmchost::i64;
using lmchost::u64;

namespace {

template <bool Reads> void move(u64 tensor, py::handle offsets, py::handle addresses, i64 nbytes)
{
    const std::vector<u64> places = lmchost::integers(offsets), hosts = lmchost::integers(addresses);
    py::gil_scoped_release free;
    lmcneuron::transfer(Reads, tensor, places, hosts, nbytes);
}

std::string nrt_why_not()
{
    try {
        lmcneuron::runtime();
        return "";
    } catch (const std::runtime_error &exc) {
        return exc.what();
    }
}

} // namespace

PYBIND11_MODULE(_native, m)
{
    m.doc() = "Host staging of lmcache-neuron, and direct reads and writes of tensors.";
    m.attr("LMCACHE_NATIVE_ABI") = LMCACHE_NATIVE_ABI;
    lmchost::bind(m);
    m.def("nrt_why_not", &nrt_why_not);
    m.def("nrt_read", &move<true>, py::arg("tensor"), py::arg("offsets"), py::arg("addresses"), py::arg("nbytes"));
    m.def("nrt_write", &move<false>, py::arg("tensor"), py::arg("offsets"), py::arg("addresses"), py::arg("nbytes"));
}
