"""``lmcache query kvcache``: how much of a prompt is held?"""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format, add_server
from lmcache.cli.output import emit
from lmcache.cli.prompt import add_prompt, read_prompt

HELP = "say how many tokens of a prompt a running server holds, and where"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_prompt(parser)
    add_server(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print, per model and tier, how many of the first tokens a hit would cover. Pins and touches nothing."""
    from lmcache.cli.connect import tool_session
    from lmcache.cli.holdings import report
    from lmcache.v1.protocol import messages as m

    prompt = read_prompt(args)
    with tool_session(args) as session:
        size = session.welcome.chunk_size
        hashes = prompt.hashes(size)
        found = session.ask(m.Query(hashes=b"".join(hashes)), m.Holdings)
    data, text = report(session, len(prompt.tokens), len(hashes), found)
    emit(args.format, data, text)
    return 0
