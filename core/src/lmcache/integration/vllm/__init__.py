"""vLLM (v1 KV connector interface, tested with 0.32)."""
