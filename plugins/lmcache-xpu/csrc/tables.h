#ifndef LMCACHE_XPU_TABLES_H
#define LMCACHE_XPU_TABLES_H

#include "api.h"

namespace lmc {

struct Tables {
    sycl::context context;
    sycl::device device_of;
    size_t room; // values
    u64 *host, *device;
    sycl::event done; // of the launch that used it last
    bool taken;
};

// Room for so many values, which no launch reads any more. Whoever takes it gives it back.
Tables *take_tables(const sycl::queue &queue, size_t values);
void give_back(Tables *tables, const sycl::event &done);

} // namespace lmc

#endif
