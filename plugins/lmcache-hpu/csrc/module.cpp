// lmcache_hpu._native: host staging. The device itself is reached through torch alone, so that nothing here links a
// library of the vendor's.
#include "host/binding.h"

#include <lmcache/abi.h>

PYBIND11_MODULE(_native, m)
{
    m.doc() = "Host staging of lmcache-hpu.";
    m.attr("LMCACHE_NATIVE_ABI") = LMCACHE_NATIVE_ABI;
    lmchost::bind(m);
}
