# The SDK's version is the core's, as abi.h has it. What asks for an earlier version of the same major is served.

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../include/lmcache/abi.h" lmcache_version_lines
     REGEX "^#define LMCACHE_VERSION_(MAJOR|MINOR|PATCH) [0-9]+$")
string(REGEX REPLACE "[^0-9;]" "" lmcache_version_numbers "${lmcache_version_lines}")
list(GET lmcache_version_numbers 0 lmcache_version_major)
string(REPLACE ";" "." PACKAGE_VERSION "${lmcache_version_numbers}")

if(NOT PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
elseif(PACKAGE_FIND_VERSION_MAJOR EQUAL lmcache_version_major
       AND NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
else()
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
endif()
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
