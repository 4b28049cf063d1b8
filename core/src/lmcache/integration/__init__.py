"""Engines. The only place that knows one."""
