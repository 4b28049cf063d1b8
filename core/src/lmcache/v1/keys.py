"""Cache identity: what makes two KV chunks the same chunk.

An object's key has two halves, both BLAKE3 digests of typed, length-prefixed bytes:

* the *namespace*: model, revision, layout, dtype, topology, chunk size (:class:`Namespace`). Bytes of one
  namespace mean nothing in another, so nothing is ever read across.
* the *chunk*: the tokens up to the end of the chunk, chained per chunk, in a :class:`Scope` of LoRA adapter,
  salt and tags, together with the hashes of the media items that the chunk's placeholders stand for.

BLAKE3's ``derive_key`` mode tags the domain; its keyed mode chains: a chunk's digest is the hash of its
tokens under the digest before it as the key. (BLAKE3 paper, 2020, section 2: "modes".) Another implementation
can reproduce all of it from ``tests/unit/golden_keys.json``.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from blake3 import blake3

DIGEST_BYTES = 32
_CONTEXT = "lmcache 2026-11 {} v1"

Canonical: TypeAlias = "bool | int | str | bytes | Sequence[Any] | Mapping[str, Any] | None"


def canonical(value: Canonical) -> bytes:
    """Encode ``value`` so that different values never share an encoding.

    One tag byte, the payload's length as an unsigned 64-bit little-endian integer, the payload. Integers are
    decimal ASCII, text is UTF-8, a mapping is its items sorted by key. Floats are refused: they have no one
    spelling.

    Raises:
        TypeError: for a type that has no canonical form.
    """
    if value is None:
        tag, body = b"n", b""
    elif isinstance(value, bool):
        tag, body = b"t", b"1" if value else b"0"
    elif isinstance(value, int):
        tag, body = b"i", b"%d" % value
    elif isinstance(value, str):
        tag, body = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes | bytearray | memoryview):
        tag, body = b"b", bytes(value)
    elif isinstance(value, Mapping):
        tag, body = b"m", b"".join(canonical(k) + canonical(value[k]) for k in sorted(value))
    elif isinstance(value, Sequence):
        tag, body = b"l", b"".join(canonical(item) for item in value)
    else:
        raise TypeError(
            f"cache key field of type {type(value).__name__}:"
            " expected None, bool, int, str, bytes, list or dict"
        )
    return tag + len(body).to_bytes(8, "little") + body


def digest(domain: str, value: Canonical) -> bytes:
    """32-byte BLAKE3 digest of ``value`` in the domain ``domain``."""
    return blake3(canonical(value), derive_key_context=_CONTEXT.format(domain)).digest()


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must agree before stored bytes mean the same KV (architecture section 5).

    ``page_bytes`` holds, per layer in order, the bytes of one block's page; where a layer is several tensors, of
    each of them in turn, and ``layers`` has its name as often. ``packing`` names the in-page packing (for vLLM's
    CPU backend the instruction set that ordered K). ``extra`` carries whatever else an integration knows to matter,
    such as quantisation or rope settings.
    """

    model: str
    revision: str
    engine: str
    format: str
    dtype: str
    block_size: int
    chunk_size: int
    kv_heads: int
    head_size: int
    page_bytes: tuple[int, ...]
    packing: str = "plain"
    layers: tuple[str, ...] = ()
    group: int = 0
    groups: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    extra: dict[str, str] = {}

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_size // self.block_size

    @property
    def object_bytes(self) -> int:
        """Bytes of one stored chunk: every layer's pages of the chunk's blocks."""
        return self.blocks_per_chunk * sum(self.page_bytes)

    def digest(self) -> bytes:
        return digest("namespace", msgspec.to_builtins(self))


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """A multimodal item: placeholder tokens ``[offset, offset + length)`` stand for content ``hash``."""

    offset: int
    length: int
    hash: str


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What separates equal tokens within a namespace: adapter identity, tenant salt, request tags."""

    chunk_size: int
    lora: str = ""
    salt: str = ""
    tags: dict[str, str] = {}

    def digest(self) -> bytes:
        return digest("scope", msgspec.to_builtins(self))


def account_id(salt: str) -> str:
    """Whose quota chunks of this salt count against: 16 hex digits, or nothing for no salt. A salt may be a
    secret, so it travels and is stored in this form only."""
    return digest("account", salt)[:8].hex() if salt else ""


def pack_tokens(tokens: Sequence[int]) -> memoryview:
    """Token ids as unsigned 32-bit little-endian integers, as a view of bytes.

    Raises:
        OverflowError: for a negative id or one above 2**32 - 1.
    """
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if sys.byteorder == "big":
        packed = array("I", packed)
        packed.byteswap()
    return memoryview(packed).cast("B")


def _media_of_chunk(media: Iterable[MediaItem], start: int, end: int) -> bytes:
    touching = [
        [m.offset - start, m.length, m.hash] for m in media if m.offset < end and m.offset + m.length > start
    ]
    return canonical(touching) if touching else b""


def chunk_hashes(
    tokens: Sequence[int],
    scope: Scope,
    *,
    media: Sequence[MediaItem] = (),
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Digests of every complete chunk of ``tokens``; a partial tail has none.

    ``known`` are digests of the first chunks, computed before for the same prefix; only the rest is hashed.
    512 chunks of 256 tokens take about 1.4 ms.
    """
    size = scope.chunk_size
    done = len(known)
    total = len(tokens) // size
    hashes = list(known[:total])
    if total <= done:
        return hashes
    # A copy of a long list costs as much as its hashing, so the partial tail is packed, too, and left alone.
    packed = pack_tokens(tokens[done * size :] if done else tokens)
    previous = hashes[-1] if hashes else scope.digest()
    stride = size * 4
    append = hashes.append
    for at in range(0, (total - done) * stride, stride):
        data: bytes | memoryview = packed[at : at + stride]
        if media:
            start = done * size + at // 4
            data = bytes(data) + _media_of_chunk(media, start, start + size)
        previous = blake3(data, key=previous).digest()
        append(previous)
    return hashes


def object_key(namespace: bytes, chunk: bytes) -> bytes:
    """64-byte key of a stored object: namespace digest, then chunk digest."""
    return namespace + chunk
