"""Cold hooks for plugins that are no devices: entry-point group ``lmcache.plugins``, carried by pluggy.

A plugin is a module (or an object) whose functions are marked with :data:`hookimpl` and named by
``lmcache.v1.plugins.hookspecs``. An entry point ``cli.VERB`` is loaded by ``lmcache VERB`` alone; every other
one by ``lmcache server``. See ``docs/plugins.md``.
"""

from __future__ import annotations

from lmcache.v1.plugins.hookspecs import ServerHandle, Verb, hookimpl
from lmcache.v1.plugins.host import PluginHost
from lmcache.v1.plugins.records import PluginRecord

__all__ = ["PluginHost", "PluginRecord", "ServerHandle", "Verb", "hookimpl"]
