"""A sample storage adapter of LMCache."""
