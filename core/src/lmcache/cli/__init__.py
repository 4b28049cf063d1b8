"""The command line. Torch-free; every verb imports what it needs when it runs."""
