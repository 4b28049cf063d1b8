"""LMCache's device plugin for Intel Gaudi accelerators. Importing it loads neither torch nor Gaudi's software."""
