"""LMCache's device plugin for NVIDIA and AMD GPUs. Importing it loads neither torch nor a driver."""
