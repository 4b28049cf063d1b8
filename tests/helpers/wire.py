"""Hypothesis strategies for what may arrive on the request port."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from helpers.server import namespace
from lmcache.v1.keys import DIGEST_BYTES
from lmcache.v1.protocol import messages as m

integers = st.one_of(st.integers(-2, 5), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1]))
texts = st.text(max_size=20)
digests = st.one_of(
    st.integers(0, 3).map(lambda n: bytes(n * DIGEST_BYTES)),
    st.integers(0, 3).map(lambda n: b"d" * n * DIGEST_BYTES),
    st.binary(max_size=3 * DIGEST_BYTES),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), texts)
plain: st.SearchStrategy[Any] = st.recursive(
    scalars | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
roles = st.sampled_from(["scheduler", "worker", "tool"])


def requests_of(session: str) -> st.SearchStrategy[m.Request]:
    """Messages of the right types with any values; most are of ``session``, so that they get far."""
    sessions = st.sampled_from([session, session, session, ""])
    names = st.sampled_from(["r", "r", "", "other"])
    engines = st.sampled_from(["engine", "", "other"])
    namespaces = st.lists(
        st.builds(
            namespace,
            model=names,
            chunk_size=st.one_of(st.just(256), integers),
            block_size=integers,
            page_bytes=st.one_of(st.just((64,)), st.lists(integers, max_size=3).map(tuple)),
            extra=st.dictionaries(texts, texts, max_size=2),
            group=integers,
            tp_rank=integers,
        ),
        max_size=2,
    )
    few = st.lists(integers, max_size=3)
    blocks = st.lists(few, max_size=2)
    wires = st.lists(st.lists(st.binary(max_size=40), max_size=2), max_size=2)
    exports = st.none() | st.builds(m.DeviceExport, groups=wires)
    owned = {"session": sessions, "lease": integers}
    span = {"index": integers, "offset": integers}
    chain = {"request": names, "hashes": digests, "known": integers, "start": integers}
    waits = st.one_of(st.sampled_from([-1.0, 0.0, 0.01]), st.floats())
    accounts = st.one_of(st.just(""), st.just("0123456789abcdef"), texts)
    chain |= {"wait": waits, "account": accounts}
    tiers = st.none() | st.lists(st.sampled_from(["l1", "disk", ""]), max_size=2)
    who = {"role": roles, "engine": engines, "rank": integers, "ranks": integers, "client": texts}
    return st.one_of(
        st.builds(m.Hello, protocol_min=integers, protocol_max=integers, **who),
        st.builds(m.Ping, session=sessions),
        st.builds(m.Register, session=sessions, namespaces=namespaces, mapped=st.booleans(), device=exports),
        st.builds(m.Lookup, **owned, **chain),
        st.builds(m.Reserve, **owned, hashes=st.lists(digests, max_size=2), account=accounts),
        st.builds(m.Write, **owned, **span),
        st.builds(m.Commit, **owned, indexes=few, wait=waits),
        st.builds(
            m.DeviceStore,
            **owned,
            hashes=st.lists(digests, max_size=2),
            blocks=blocks,
            event=st.binary(max_size=9),
        ),
        st.builds(m.DeviceLoad, **owned, blocks=blocks, skip=few, event=st.binary(max_size=9)),
        st.builds(m.DeviceFence, **owned),
        st.builds(m.Abort, session=sessions, leases=few),
        st.builds(m.Read, **owned, **span, length=integers),
        st.builds(m.Release, session=sessions, leases=few),
        st.builds(m.EndRequest, session=sessions, requests=st.lists(names, max_size=3)),
        st.builds(m.Query, hashes=digests),
        st.builds(m.Status),
        st.builds(m.Clear, tiers=tiers, account=st.none() | accounts, force=st.booleans()),
        st.builds(
            m.ListObjects,
            tier=st.sampled_from(["l1", "l1", "fault", "x"]),
            after=st.binary(max_size=70),
            limit=integers,
            account=st.none() | accounts,
        ),
        st.builds(m.Hold, hashes=digests, on=st.booleans()),
        st.builds(m.Warm, hashes=digests, account=accounts, wait=waits),
        st.builds(m.SetQuota, account=accounts, limit_bytes=st.none() | integers),
        st.builds(m.Quotas),
    )


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message of the protocol with bytes changed, cut off, inserted or repeated."""
    data = bytearray(m.encode(draw(requests_of("s"))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["change", "cut", "insert", "repeat"]))
        if kind == "change" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        else:
            data[at:at] = data[:at]
    return bytes(data)


near_misses = st.dictionaries(st.sampled_from(["op", "session", "lease", "hashes", "request"]), plain)
depths = st.integers(1, 100_000)
messages = st.one_of(
    st.binary(max_size=200),
    damaged(),
    plain.map(msgspec.msgpack.encode),
    near_misses.map(msgspec.msgpack.encode),
    depths.map(lambda depth: b"\x91" * depth),
    depths.map(lambda depth: b"\x82\xa2op\xa4ping\xa1x" + b"\x91" * depth),
)
"""What may stand in the place of a message: some are good ones."""

idents = st.one_of(st.just(bytes(8)), st.just(b"\1" * 8), st.binary(max_size=9))
frames = st.builds(
    lambda ident, rest: [*ident, *rest] or [b""], st.lists(idents, max_size=1), st.lists(messages, max_size=3)
)
"""One to four frames: an id, as often a right one as not, a message, payload."""
