"""``lmcache tool simulate``: how much of a recorded load would eviction policies have kept?"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmcache.cli.args import add_format, at_least
from lmcache.cli.output import clean, emit, table
from lmcache.errors import ConfigError, LMCacheError
from lmcache.v1.storage import simulation
from lmcache.v1.storage.eviction import EvictionPolicy
from lmcache.v1.storage.policies import BUILT_IN

HELP = "replay recorded requests against eviction policies"
OPTIMUM = "optimum"
REPLAYS = {"accesses": simulation.hits_by_access, "l1": simulation.hits_through_l1}

_Make = Callable[[], EvictionPolicy]
_Shares = Mapping[str, Sequence[float]]


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("trace", metavar="TRACE", help="JSON lines with hash_ids, as Mooncake's; plain or xz")
    names = ", ".join(BUILT_IN)
    parser.add_argument(
        "--policy",
        default="all",
        metavar="NAMES",
        help=f"policies with commas between: {names}, a plugin's; all is those named here (all)",
    )
    parser.add_argument(
        "--blocks",
        type=_sizes,
        default=[1000, 5000, 10000, 20000, 50000],
        metavar="SIZES",
        help="sizes of the cache in blocks, with commas between (1000,5000,10000,20000,50000)",
    )
    parser.add_argument(
        "--replay",
        choices=REPLAYS,
        default="accesses",
        help="accesses: block after block; l1: request after request through the server's L1 (accesses)",
    )
    parser.add_argument("--plot", metavar="FILE", help="write a chart, as SVG")
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Replay the trace against every policy at every size."""
    from lmcache.cli.traces import read_trace

    with _makers(args.policy) as makers:
        trace = read_trace(args.trace)
        accesses = sum(map(len, trace))
        replay = REPLAYS[args.replay]
        hits = {name: [replay(make(), trace, n) for n in args.blocks] for name, make in makers.items()}
    hits[OPTIMUM] = [simulation.most_hits(trace, n) for n in args.blocks]
    shares = {name: [round(n / accesses, 5) for n in counts] for name, counts in hits.items()}
    data = {
        "trace": Path(args.trace).name,
        "replay": args.replay,
        "requests": len(trace),
        "blocks": accesses,
        "distinct_blocks": len({key for request in trace for key in request}),
        "sizes": args.blocks,
        "hits": hits,
        "hit_rates": shares,
    }
    if args.plot:
        _plot(args.plot, f"{data['trace']}, replay {args.replay}", args.blocks, shares)
    emit(args.format, data, _text(data, args.blocks, shares))
    return 0


def _text(data: Mapping[str, object], sizes: Sequence[int], shares: _Shares) -> str:
    head = (
        f"{clean(data['trace'])}: {data['requests']} requests, {data['blocks']} blocks,"
        f" {data['distinct_blocks']} of them distinct; replay {data['replay']};"
        " % of blocks found, by size of the cache in blocks"
    )
    rows = [(name, *map(_Percent, row)) for name, row in shares.items()]
    return f"{head}\n{table(('policy', *map(str, sizes)), rows)}"


class _Percent(float):
    """A share that prints as a percentage."""

    def __str__(self) -> str:
        return f"{100 * self:.1f}"


def _plot(name: str, title: str, sizes: Sequence[int], shares: _Shares) -> None:
    from lmcache.cli.plot import line_chart

    lines = {policy: [100 * share for share in row] for policy, row in shares.items()}
    chart = line_chart(title, "blocks in the cache", "% found", sizes, lines)
    try:
        Path(name).write_text(chart, encoding="utf-8")
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise LMCacheError(f"--plot {name}: cannot be written ({why}); choose another file") from None


def _sizes(text: str) -> list[int]:
    return sorted({at_least(1)(part) for part in text.split(",")})


@contextmanager
def _makers(names: str) -> Iterator[dict[str, _Make]]:
    """Makers of the policies named. A plugin's that fails meanwhile is an error: its figures are LRU's by then."""
    wanted = list(BUILT_IN) if names == "all" else names.split(",")
    if all(name in BUILT_IN for name in wanted):
        yield {name: BUILT_IN[name] for name in wanted}
        return
    from lmcache.v1.multiprocess.server.plugins import ServerPlugins, refused_policies

    plugins = ServerPlugins()
    try:
        for name in wanted:
            if name not in plugins.policies:
                raise ConfigError(_unknown(name, plugins.policies) + refused_policies(plugins.host.records))
        yield {name: lambda name=name: plugins.make_policy(name) for name in wanted}  # type: ignore[misc]
        failed = next((record for record in plugins.host.records if record.state == "unplugged"), None)
        if failed:
            raise LMCacheError(
                f"plugin {failed.point.source}: {failed.note}: expected a policy that never raises"
            )
    finally:
        plugins.close()


def _unknown(name: str, known: list[str]) -> str:
    lower = {policy.lower(): policy for policy in known}
    close = difflib.get_close_matches(name.lower(), lower, 1)
    meant = f"; did you mean {lower[close[0]]}?" if close else ""
    return f"--policy {name!r}: expected all or some of {', '.join(known)}{meant}"
