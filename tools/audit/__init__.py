"""Audits built device wheels: `python -m audit PLUGIN WHEEL...`, with `tools/` on the path.

What a wheel of a plugin must be is a row of :mod:`audit.policies`; what is looked at is a row of
:data:`audit.rules.RULES`. Reading libraries is left to the conformance kit, `lmcache.testing.elf`.
"""
