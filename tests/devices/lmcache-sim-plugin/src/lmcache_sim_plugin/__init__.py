"""LMCache's device plugin for the simulated accelerator. Importing it loads neither torch nor the device."""
