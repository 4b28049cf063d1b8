"""The simulated accelerator with one fault at a time; see spec.py."""
