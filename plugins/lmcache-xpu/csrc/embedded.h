#ifndef LMCACHE_XPU_EMBEDDED_H
#define LMCACHE_XPU_EMBEDDED_H

#include <string>
#include <utility>
#include <vector>

namespace lmc {

std::string embedded_spirv();
std::string embedded_kernels();
std::vector<std::pair<std::string, std::string>> embedded_headers(); // name and text

} // namespace lmc

#endif
