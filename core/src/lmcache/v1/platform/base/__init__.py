"""Contracts between the core and a device backend. Importable by a plugin at its top level, torch-free."""
