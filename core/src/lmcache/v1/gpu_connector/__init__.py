"""In-process connectors between paged KV and memory objects."""
