"""Storage tiers. L1 is one shared-memory pool; the index above it knows keys, leases and eviction."""
