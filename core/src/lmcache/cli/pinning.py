"""What ``kvcache pin`` and ``kvcache unpin`` share."""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format, add_server
from lmcache.cli.output import emit
from lmcache.cli.prompt import add_prompt, read_prompt


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_prompt(parser)
    add_server(parser)
    add_format(parser)


def hold(args: argparse.Namespace, on: bool) -> int:
    """Pin or unpin a prompt; print how many objects that concerned. Exit code 1 if L1 holds nothing of it."""
    from lmcache.cli.connect import tool_session
    from lmcache.v1.protocol import messages as m

    prompt = read_prompt(args)
    with tool_session(args) as session:
        hashes = prompt.hashes(session.welcome.chunk_size)
        count = session.ask(m.Hold(hashes=b"".join(hashes), on=on), m.Ok).count
    word = "pinned" if on else "unpinned"
    data = {"address": session.address, "complete_chunks": len(hashes), word: count}
    text = f"{session.address}: {count} objects {word}"
    if not count:
        text = f"{session.address}: L1 holds nothing of these {len(hashes)} chunks; nothing is {word}"
    emit(args.format, data, text)
    return 0 if count else 1
