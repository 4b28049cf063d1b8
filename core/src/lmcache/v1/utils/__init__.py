"""Helpers that belong to no layer."""
