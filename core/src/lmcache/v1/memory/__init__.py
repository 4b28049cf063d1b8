"""Allocation of host memory. Knows offsets and sizes, no tensors."""
