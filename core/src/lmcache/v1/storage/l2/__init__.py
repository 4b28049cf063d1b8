"""Tiers behind L1: disk, Redis, S3, other servers. An adapter moves bytes; all else is done once, for all."""
