"""``lmcache config check FILE``: whether an engine would take a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lmcache.cli.args import add_format
from lmcache.cli.output import emit
from lmcache.errors import ConfigError

HELP = "check a configuration file of the in-process engine (exit code 0 or 2)"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("file", metavar="FILE", help="a YAML file")
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """The file alone, without the environment. Opens no storage engine.

    Raises:
        ConfigError: The first thing that is wrong with it.
    """
    from lmcache.v1.config import LMCacheEngineConfig, masked, places, tier_specs

    config = LMCacheEngineConfig.from_file(args.file)
    specs = tier_specs(config)
    _check_types([tier.spec["type"] for tier in specs])
    places(config.retrieve_locations, specs, "retrieve_locations")
    places(None if config.store_location is None else [config.store_location], specs, "store_location")
    tiers = [masked({"name": tier.name, **tier.spec}) for tier in specs]
    keys = sorted(config.sources)
    text = f"{args.file}: all well; settings: {len(keys)}, storage engines below L1: {len(tiers)}"
    emit(args.format, {"file": args.file, "settings": keys, "tiers": tiers}, text)
    return 0


def _check_types(types: Sequence[str]) -> None:
    from lmcache.v1.plugins.host import PluginHost
    from lmcache.v1.storage.l2.registry import BUILT_IN, check_type

    unknown = [name for name in types if name not in BUILT_IN]
    offers = PluginHost().collect("lmcache_storage_adapters", taken=BUILT_IN) if unknown else {}
    for name in unknown:
        try:
            check_type(name, offers)
        except ConfigError as exc:
            raise ConfigError(str(exc).replace("--l2-adapter", "l2_adapters")) from None
