"""Host memory: ranges, arenas, memory objects and their allocators. ``lmcache.v1.memory_management`` has the names."""
