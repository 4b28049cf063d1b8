"""The storage adapter ``peer``: another lmcache server's L1, to push to and to pull from.

Prefill pushes to decode: the peer reserves, we write, the commit publishes there what arrived whole. What the peer
holds is its own: nothing here deletes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from lmcache.errors import ConfigError, StartupError
from lmcache.logging import info_once, init_logger, warn_once
from lmcache.v1.keys import DIGEST_BYTES, Namespace
from lmcache.v1.multiprocess.peer import frames
from lmcache.v1.multiprocess.peer.direct import Writer
from lmcache.v1.multiprocess.peer.link import Line, PeerLink, SessionLost
from lmcache.v1.multiprocess.peer.nixl import NixlError, missing
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.protocol.endpoint import endpoint
from lmcache.v1.storage.l1 import EXISTS
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.envelope import EnvelopeError, ObjectInfo, pack, unpack
from lmcache.v1.storage.l2.options import read_options

logger = init_logger(__name__)

T = TypeVar("T")

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=60)]
_MARGIN = 0.5
"""Of a call's time, the part that waiting for room may take: the rest is for the bytes."""
_COMMIT_SECONDS = 2.0
_PULL_SECONDS = 60.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set."""

    address: str
    """``HOST:PORT`` of the peer's request port."""
    transport: Literal["auto", "nixl", "frames"] = "auto"
    """auto: NIXL where both sides have it, else frames; nixl: nothing else."""
    sync: bool = False
    """A commit to L1 is answered only once the peer has the objects, or the tier gave up."""
    push: bool = True
    """Store to the peer."""
    pull: bool = True
    """Load from the peer."""
    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=60)] = 1.0
    """For which the peer may keep us waiting for room."""
    timeout_seconds: _Seconds = 2.0
    """For a round trip without payload, the connection included."""

    def __post_init__(self) -> None:
        if not (self.push or self.pull):
            raise ValueError("push and pull are both false: the peer would be of no use")


def make(options: Mapping[str, Any]) -> StorageAdapter:
    """The adapter. The peer need not be there yet.

    Raises:
        ConfigError: for a bad option. StartupError: if NIXL is asked for and cannot be had.
    """
    found = read_options("peer", Options, options)
    try:
        address = endpoint(found.address)
    except ConfigError as exc:
        raise ConfigError(f"--l2-adapter peer: {exc}") from None
    why = missing()
    if found.transport == "nixl" and why:
        raise StartupError(f"--l2-adapter peer: transport=nixl: {why}, or use transport=auto")
    writer = None
    if found.push and found.transport != "frames":
        try:
            writer = Writer()
        except NixlError as exc:
            if found.transport == "nixl":
                raise StartupError(f"--l2-adapter peer: transport=nixl: {exc}") from None
            info_once(logger, "nixl", "payload to peers travels in frames: %s", exc)
    return PeerAdapter(address, found, writer)


class PeerAdapter(StorageAdapter):
    """One peer.

    Args:
        address: its ZeroMQ address.
        writer: None: payload travels in frames.
    """

    shared = True

    def __init__(self, address: str, options: Options, writer: Writer | None) -> None:
        self._options = options
        self._writer = writer
        self._link = PeerLink(address, options.timeout_seconds, writer is not None, self._tend)
        self._distrusted = ""
        """Session in which NIXL failed; then it goes on in frames."""
        self._told: tuple[str, frozenset[bytes]] = ("", frozenset())
        """Layouts that the peer was told of in a session."""
        self.sync = options.sync

    # ---- push

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        if not self._options.push:
            return [False] * len(objects)
        if len({item.key for item in objects}) < len(objects):
            return [self.store([item], call)[0] for item in objects]
        done = [False] * len(objects)
        infos = [_info(item) for item in objects]
        groups: dict[str, list[int]] = {}
        for index, info in enumerate(infos):
            if info.size:  # L1 has no room for nothing
                groups.setdefault(info.account, []).append(index)
        for account, group in groups.items():
            mine, told = [objects[i] for i in group], [infos[i] for i in group]
            stored = _again(partial(self._push, account, mine, told, call))
            for index, ok in zip(group, stored, strict=True):
                done[index] = ok
        return done

    def _push(
        self, account: str, objects: Sequence[Put], infos: Sequence[ObjectInfo], call: Call
    ) -> list[bool]:
        with self._link.line(call.remaining) as line:
            lease = self._link.new_lease()
            direct = self._may_write(line)
            wait = min(self._options.wait_seconds, call.remaining * _MARGIN)
            owed = partial(self._give_back, line.session, lease)
            try:
                offsets = self._reserve(
                    line, lease, account, objects, self._new_layouts(line, infos), wait, direct
                )
            except AdapterError:
                owed(True)  # nothing was written, but it may have been granted
                raise
            given = [i for i, offset in enumerate(offsets) if offset >= 0]
            done = [offset == EXISTS for offset in offsets]
            if not given:
                return done
            payloads = [objects[i].payload for i in given]
            if direct:
                written = self._write(line, [offsets[i] for i in given], payloads, call, owed)
                if not written:
                    return done
            else:
                try:
                    written = frames.write(line, lease, payloads, call)
                except AdapterError:
                    owed(True)
                    raise
            whole = given[:written]
            commit = p.PushCommit(
                session=line.session, lease=lease, indexes=list(range(written)),
                checksums=[infos[i].checksum for i in whole],
            )  # fmt: skip
            try:
                results = line.ask(p.Pushed, commit, max(_COMMIT_SECONDS, call.remaining)).results
            except AdapterError:
                owed(True)
                raise
            for i, result in zip(whole, results, strict=False):
                done[i] = result > 0
            if 0 in results:
                logger.warning("peer %s dropped %d objects: bytes differ", line.where, results.count(0))
            return done

    def _reserve(
        self,
        line: Line,
        lease: int,
        account: str,
        objects: Sequence[Put],
        layouts: Mapping[bytes, Namespace],
        wait: float,
        direct: bool,
    ) -> list[int]:
        message = p.PushReserve(
            session=line.session, lease=lease, keys=b"".join(item.key for item in objects),
            sizes=[len(item.payload) for item in objects], account=account, wait=wait, direct=direct,
            layouts=list(layouts.values()),
        )  # fmt: skip
        slots = line.ask(m.Reserved, message, self._options.timeout_seconds + wait).slots
        if len(slots) != 1 or len(slots[0]) != 2 * len(objects):
            raise AdapterError(f"peer {line.where}: its answer names other objects than were asked for")
        session, known = self._told
        self._told = (line.session, frozenset(layouts) | (known if session == line.session else frozenset()))
        return slots[0][::2]

    def _new_layouts(self, line: Line, infos: Sequence[ObjectInfo]) -> dict[bytes, Namespace]:
        """Those of the objects that the peer has not heard of in this session, as many as it will hear of at once."""
        session, known = self._told
        found = {info.key[:DIGEST_BYTES]: info.namespace for info in infos if info.namespace is not None}
        new = [item for item in found.items() if session != line.session or item[0] not in known]
        return dict(new[: p.MAX_LAYOUTS])

    def _write(
        self, line: Line, offsets: Sequence[int], payloads: Sequence[memoryview], call: Call, owed: Any
    ) -> int:
        """Number of payloads that are where they belong: all or none."""
        assert self._writer is not None  # noqa: S101 -- see _may_write
        try:
            if self._writer.write(line.opened, offsets, payloads, call, owed):
                return len(payloads)
            why = "not over in time"
        except NixlError as exc:
            why = str(exc)
        if self._options.transport == "nixl":
            raise AdapterError(f"peer {line.where}: NIXL: {why}")
        self._distrusted = line.session
        warn_once(logger, line.session, "peer %s: NIXL: %s; payload goes on in frames", line.where, why)
        return 0

    def _may_write(self, line: Line) -> bool:
        """Whether to push by NIXL.

        Raises:
            AdapterError: if nothing else was asked for and the peer cannot.
        """
        region, why = line.opened.region, line.opened.why
        if region is None and self._options.transport == "nixl":
            raise AdapterError(f"peer {line.where}: transport=nixl: {why}")
        if region is None and self._writer is not None:
            info_once(logger, line.where, "payload to peer %s travels in frames: %s", line.where, why)
        return region is not None and self._writer is not None and self._distrusted != line.session

    def _give_back(self, session: str, lease: int, over: bool) -> None:
        self._link.owe(p.PushAbort(session=session, leases=[lease], over=over))

    def _tend(self) -> None:
        if self._writer is not None:
            self._writer.tend()

    # ---- pull

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        if not self._options.pull:
            return [False] * len(keys)
        known: dict[bytes, bool] = {}
        distinct = list(dict.fromkeys(keys))
        for at in range(0, len(distinct), p.MAX_KEYS):
            part = distinct[at : at + p.MAX_KEYS]
            known.update(zip(part, _again(partial(self._find, part, call)), strict=True))
        return [known[key] for key in keys]

    def _find(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        with self._link.line(call.remaining) as line:
            message = p.PeerFind(session=line.session, keys=b"".join(keys))
            held = line.ask(p.PeerFound, message, self._seconds(call)).held
        if len(held) != len(keys):
            raise AdapterError(f"peer {line.where}: {len(held)} answers for {len(keys)} keys")
        return held

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        if not self._options.pull or not wants:
            return [None] * len(wants)
        if len({want.key for want in wants}) < len(wants):
            return [self.load([want], call)[0] for want in wants]
        return _again(partial(self._pull, wants, call))

    def _pull(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        headers: list[bytes | None] = [None] * len(wants)
        with self._link.line(call.remaining) as line:
            lease = self._link.new_lease()
            close = p.PullClose(session=line.session, leases=[lease])
            message = p.PullOpen(
                session=line.session, lease=lease, keys=b"".join(want.key for want in wants),
                seconds=min(_PULL_SECONDS, call.remaining + self._options.timeout_seconds),
            )  # fmt: skip
            try:
                pulled = line.ask(p.Pulled, message, call.remaining)
                if not len(pulled.sizes) == len(pulled.checksums) == len(wants):
                    raise AdapterError(
                        f"peer {line.where}: {len(pulled.sizes)} answers for {len(wants)} keys"
                    )
                for index, want in enumerate(wants):
                    size = len(want.payload)
                    if pulled.sizes[index] == size and frames.read(line, lease, index, want.payload, call):
                        headers[index] = pack(ObjectInfo(want.key, size, pulled.checksums[index]))
            except AdapterError:
                self._link.owe(close)
                raise
            if not line.post(close):
                self._link.owe(close)
        return headers

    def _seconds(self, call: Call) -> float:
        return min(self._options.timeout_seconds, call.remaining)

    # ---- the rest

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """Never: the objects are the peer's own."""
        return [False] * len(keys)

    def clear(self, call: Call) -> int:
        """Nothing there is ours."""
        return 0

    def usage(self) -> Usage:
        return Usage(-1, -1, 0)

    def describe(self) -> str:
        opened = self._link.opened
        state = "not connected"
        if opened is not None:
            direct = opened.region is not None and self._distrusted != opened.session
            state = "nixl" if direct else "frames"
        verbs = " and ".join(verb for verb in ("push", "pull") if getattr(self._options, verb))
        return f"{self._link.address} ({verbs}, {state})"

    def close(self) -> None:
        bye = self._writer is None or self._writer.idle
        self._link.close(bye)  # else the peer keeps the memory till our connection is gone
        if self._writer is not None:
            self._writer.close()


def _again(call: Callable[[], T]) -> T:
    """Once more in a new session, if the peer has forgotten the old one."""
    try:
        return call()
    except SessionLost:
        return call()


def _info(item: Put) -> ObjectInfo:
    try:
        return unpack(item.header)
    except EnvelopeError as exc:
        raise AdapterError(f"object {item.key.hex()[:16]}…: {exc}") from None
