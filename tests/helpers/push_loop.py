"""A process that pushes to a peer for ever: ``python -m helpers.push_loop ADDRESS TRANSPORT TAG``.

It says ``go`` after its first push. What it pushes has names and bytes that the test knows.
"""

from __future__ import annotations

import random
import sys
from itertools import count

from helpers.pusher import put_of
from lmcache.v1.storage.l2.adapter import AdapterError, Call
from lmcache.v1.storage.l2.registry import build

KEPT = 12
SIZES = (1, 100, 4096, 70_000, 1 << 20, 9 << 20)


def size_of(tag: str, number: int) -> int:
    """Of the object that is pushed as ``number``."""
    return random.Random(f"{tag} {number}").choice(SIZES)


def main(address: str, transport: str, tag: str) -> None:
    adapter = build({"type": "peer", "address": address, "transport": transport})
    # Made before, so that a kill is more likely to meet a push than the making.
    ready = [put_of((tag, number), size_of(tag, number)) for number in range(KEPT)]
    for number in count():
        at = number % KEPT
        try:
            adapter.store([*ready[at : at + 3], put_of((tag, KEPT + number), 5000)], Call(10))
        except AdapterError as exc:
            print(exc, file=sys.stderr)
        if not number:
            print("go", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
