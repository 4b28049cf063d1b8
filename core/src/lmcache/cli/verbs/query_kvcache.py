"""``lmcache query kvcache``: how much of a prompt is held?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache.cli.args import add_format, add_server, pair
from lmcache.cli.output import emit, table
from lmcache.cli.tokens import add_token_source, read_tokens
from lmcache.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.cli.holdings import ModelHolding

_SHOWN = 20
"""Characters of a revision in the table; the JSON object has it whole."""

HELP = "say how many tokens of a prompt a running server holds, and where"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_token_source(parser)
    flag = parser.add_argument
    flag(
        "--lora",
        default="",
        metavar="NAME=PATH",
        help="LoRA adapter of the requests meant, as given to vLLM (none)",
    )
    flag("--salt", default="", help="their cache salt (none)")
    flag(
        "--tag",
        type=pair,
        action="append",
        metavar="KEY=VALUE",
        help="one of their request tags; may be repeated",
    )
    add_server(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print, per model and tier, how many of the first tokens a hit would cover. Pins and touches nothing."""
    import msgspec

    from lmcache.cli.connect import tool_session
    from lmcache.cli.holdings import summarise
    from lmcache.v1.keys import Scope, chunk_hashes
    from lmcache.v1.protocol import messages as m

    tokens, lora = read_tokens(args), _lora(args.lora)
    with tool_session(args) as session:
        size = session.welcome.chunk_size
        scope = Scope(chunk_size=size, lora=lora, salt=args.salt, tags=dict(args.tag or ()))
        hashes = chunk_hashes(tokens, scope)
        models = summarise(session.ask(m.Query(hashes=b"".join(hashes)), m.Holdings).rows, size)
    data = {
        "address": session.address,
        "epoch": session.welcome.epoch,
        "tokens": len(tokens),
        "chunk_size": size,
        "complete_chunks": len(hashes),
        "models": msgspec.to_builtins(models),
    }
    head = f"{session.address}: asked for {len(tokens)} tokens, {len(hashes)} complete chunks of {size}"
    emit(args.format, data, f"{head}\n{_text(models)}")
    return 0


def _text(models: Sequence[ModelHolding]) -> str:
    if not models:
        return "no engine has registered a model with this server since it started"
    rows = [
        (
            entry.model,
            entry.revision if len(entry.revision) <= _SHOWN else f"{entry.revision[:_SHOWN]}…",
            entry.dtype,
            f"TP {entry.tp_size}, PP {entry.pp_size}, groups {entry.groups}",
            entry.tier,
            entry.tokens,
            "" if entry.complete else "not all ranks have registered",
        )
        for entry in models
    ]
    return table(("model", "revision", "dtype", "parts", "tier", "tokens held", "note"), rows)


def _lora(text: str) -> str:
    """The identity that the connector gives to the adapter ``NAME=PATH``; other text is one already."""
    name, equals, path = text.partition("=")
    if not equals:
        return text
    from lmcache.integration.vllm.identity import lora_identity

    try:
        return lora_identity(argparse.Namespace(lora_name=name, lora_path=path))
    except OSError as exc:
        raise ConfigError(f"--lora {text}: {path} cannot be read ({exc.strerror})") from None
