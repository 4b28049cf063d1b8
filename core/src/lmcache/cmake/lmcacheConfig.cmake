# find_package(lmcache CONFIG): the vendor SDK, headers only.
#
#   lmcache::sdk         INTERFACE target that carries the include folder
#   lmcache_INCLUDE_DIR  the same folder
#
# scikit-build-core finds this file when lmcache is among the build's requirements; elsewhere pass
# -Dlmcache_DIR=$(python -c "import lmcache; print(lmcache.get_cmake_dir())").

get_filename_component(lmcache_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)
if(NOT TARGET lmcache::sdk)
  add_library(lmcache::sdk INTERFACE IMPORTED)
  set_target_properties(lmcache::sdk PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${lmcache_INCLUDE_DIR}")
endif()
set(lmcache_FOUND TRUE)
