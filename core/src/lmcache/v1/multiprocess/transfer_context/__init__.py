"""Worker side of a transfer: between an engine's paged KV and the cache server."""
