"""LMCache's device plugin for Intel GPUs. Importing it loads neither torch nor the SYCL runtime."""
