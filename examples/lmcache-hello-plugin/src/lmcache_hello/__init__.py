"""A sample plugin of LMCache."""
