"""From a request's tokens to chunks, and from its settings to what keeps equal tokens apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from lmcache.errors import ConfigError, bad_value
from lmcache.v1.keys import DIGEST_BYTES, MediaItem, Scope, chunk_hashes, pack_tokens

__all__ = ["Chunk", "Request", "TokenDatabase", "false_prefix", "token_list"]

_TAIL = "lmcache 2026-11 tail v1"
_TAG = "lmcache.tag."
_LORA = "lmcache.lora"
_SALT = "lmcache.cache_salt"
_MEDIA = "lmcache.media"
_SKIP = "lmcache.skip_save"


class Chunk(NamedTuple):
    """Tokens ``[start, end)`` of a request. ``digest`` stands for them and for all before them."""

    start: int
    end: int
    digest: bytes

    @property
    def tokens(self) -> int:
        return self.end - self.start


class Request(NamedTuple):
    """What ``request_configs`` says of one request."""

    scope: Scope
    media: tuple[MediaItem, ...] = ()
    skip_save: bool = False


class TokenDatabase:
    """Cuts tokens into chunks.

    Args:
        chunk_size: Tokens per chunk.
        save_unfull: Whether the rest below one chunk makes a chunk of its own, whose key holds its length.
    """

    def __init__(self, chunk_size: int, save_unfull: bool = False) -> None:
        self.chunk_size = chunk_size
        self.save_unfull = save_unfull

    def request(self, configs: Mapping[str, Any] | None) -> Request:
        """``lmcache.tag.NAME``, ``lmcache.cache_salt``, ``lmcache.lora``, ``lmcache.media`` (``[[first placeholder,
        placeholders, hash], …]``) and ``lmcache.skip_save``; other keys are not ours.

        Raises:
            ConfigError: One of them has the wrong type.
        """
        configs = configs or {}
        tags = {key.removeprefix(_TAG): _text(key, configs[key]) for key in configs if key.startswith(_TAG)}
        scope = Scope(
            chunk_size=self.chunk_size,
            lora=_text(_LORA, configs.get(_LORA)),
            salt=_text(_SALT, configs.get(_SALT)),
            tags=tags,
        )
        return Request(scope, _media(configs.get(_MEDIA)), bool(configs.get(_SKIP)))

    def chunks(self, tokens: Sequence[int], request: Request) -> list[Chunk]:
        """The chunks of ``tokens`` in order.

        Raises:
            ConfigError: A token is negative or above 2**32 - 1.
        """
        try:
            return self._chunks(tokens, request)
        except OverflowError:
            wrong = next(token for token in tokens if not 0 <= token < 1 << 32)
            raise ConfigError(bad_value("token", wrong, "an id from 0 to 4294967295")) from None

    def _chunks(self, tokens: Sequence[int], request: Request) -> list[Chunk]:
        size = self.chunk_size
        digests = chunk_hashes(tokens, request.scope, media=request.media)
        found = [Chunk(i * size, (i + 1) * size, digest) for i, digest in enumerate(digests)]
        rest = len(digests) * size
        if self.save_unfull and rest < len(tokens):
            before = digests[-1] if digests else request.scope.digest()
            found.append(Chunk(rest, len(tokens), self._tail_digest(tokens[rest:], before, request, rest)))
        return found

    def _tail_digest(self, tail: Sequence[int], before: bytes, request: Request, start: int) -> bytes:
        """In a domain of its own, so that no tail is ever taken for a whole chunk."""
        touching = [m for m in request.media if m.offset < start + len(tail) and m.offset + m.length > start]
        key = blake3(before, derive_key_context=_TAIL).digest()
        for item in touching:
            key = blake3(f"{item.offset - start} {item.length} {item.hash}".encode(), key=key).digest()
        return blake3(pack_tokens(tail), key=key).digest()

    def given(self, hashes: Sequence[bytes], lengths: Sequence[int]) -> list[Chunk]:
        """Chunks whose digests another engine's ``chunks`` computed, such as the scheduler's.

        Args:
            hashes: Digests.
            lengths: Tokens of each.

        Raises:
            ConfigError: They are no digests, or not as many.
        """
        if len(hashes) != len(lengths):
            raise ConfigError(bad_value("offsets", len(lengths), f"as many as hashes, {len(hashes)}"))
        found, start = [], 0
        for digest, length in zip(hashes, lengths, strict=True):
            if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
                raise ConfigError(
                    bad_value(
                        "hashes",
                        digest,
                        f"digests of {DIGEST_BYTES} bytes, as token_database.chunks makes them",
                    )
                )
            if length < 1:
                raise ConfigError(bad_value("offsets", length, "tokens of a chunk, 1 or more"))
            found.append(Chunk(start, start + length, digest))
            start += length
        return found


def token_list(tokens: Any) -> Sequence[int]:
    """Tokens as a sequence of Python's; a tensor or an array becomes a list."""
    found: Sequence[int] = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return found


def false_prefix(mask: Any, tokens: int, chunk_size: int) -> int:
    """How many tokens at the front a mask leaves out. None leaves out none.

    Raises:
        ValueError: It is not as long as the tokens, has a hole, or does not end on a chunk's edge.
    """
    if mask is None:
        return 0
    flags = bytes(map(bool, token_list(mask)))
    if len(flags) != tokens:
        raise ValueError(bad_value("mask", f"{len(flags)} entries", f"as many as tokens, {tokens}"))
    skipped = tokens - sum(flags)
    if 1 in flags[:skipped]:
        raise ValueError(
            bad_value("mask", f"true at {flags.index(1)}", f"false for the first {skipped} tokens, then true")
        )
    if skipped % chunk_size and skipped != tokens:
        raise ValueError(
            bad_value("mask", f"{skipped} tokens left out", f"a multiple of the chunk size {chunk_size}")
        )
    return skipped


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(bad_value(key, type(value).__name__, "text"))
    return str(value)


def _media(value: Any) -> tuple[MediaItem, ...]:
    if not value:
        return ()
    try:
        items = [MediaItem(int(offset), int(length), str(digest)) for offset, length, digest in value]
    except (TypeError, ValueError):
        raise ConfigError(
            bad_value(_MEDIA, value, "a list of [first placeholder, placeholders, hash]")
        ) from None
    return tuple(items)
