"""What a cache key promises: the same inputs give the same key everywhere, other inputs another one."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from lmcache.v1.keys import (
    DIGEST_BYTES,
    MediaItem,
    Namespace,
    Scope,
    canonical,
    chunk_hashes,
    digest,
    object_key,
    pack_tokens,
)

GOLDEN = json.loads(Path(__file__).with_name("golden_keys.json").read_text("utf-8"))

# ------------------------------------------------------- a second implementation, from the golden file's text


def plain(value: Any) -> Any:
    """A golden file's value: JSON has no bytes, so they are written ``{"$bytes": hex}``."""
    if isinstance(value, dict):
        if value.keys() == {"$bytes"}:
            return bytes.fromhex(value["$bytes"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def encode(value: Any) -> bytes:
    if value is None:
        return b"n" + bytes(8)
    if value is True or value is False:
        return b"t" + struct.pack("<Q", 1) + (b"1" if value else b"0")
    if isinstance(value, int):
        return frame(b"i", str(value).encode("ascii"))
    if isinstance(value, str):
        return frame(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return frame(b"b", value)
    if isinstance(value, list):
        return frame(b"l", b"".join(map(encode, value)))
    return frame(b"m", b"".join(encode(key) + encode(value[key]) for key in sorted(value)))


def frame(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body


def tagged_digest(domain: str, value: Any) -> bytes:
    return blake3(encode(value), derive_key_context=f"lmcache 2026-11 {domain} v1").digest()


def chain(case: dict[str, Any]) -> list[str]:
    scope, tokens = case["scope"], case["tokens"]
    size, key, out = scope["chunk_size"], tagged_digest("scope", scope), []
    for start in range(0, len(tokens) - size + 1, size):
        end = start + size
        data = struct.pack(f"<{size}I", *tokens[start:end])
        touching = [
            [at - start, length, name]
            for at, length, name in case["media"]
            if at < end and at + length > start
        ]
        key = blake3(data + (encode(touching) if touching else b""), key=key).digest()
        out.append(key.hex())
    return out


# --------------------------------------------------------------------------------------------- golden vectors


def ours() -> dict[str, list[str]]:
    """Every digest of the golden file, made by the code under test."""
    return {
        "canonical": [canonical(plain(case["value"])).hex() for case in GOLDEN["canonical"]],
        "digest": [digest(case["domain"], plain(case["value"])).hex() for case in GOLDEN["digest"]],
        "namespace": [namespace_of(case).digest().hex() for case in GOLDEN["namespace"]],
        "scope": [Scope(**case["scope"]).digest().hex() for case in GOLDEN["scope"]],
        "chunks": [
            h.hex()
            for case in GOLDEN["chunks"]
            for h in chunk_hashes(
                case["tokens"],
                Scope(**case["scope"]),
                media=[MediaItem(*item) for item in case["media"]],
            )
        ],
        "object_key": [
            object_key(bytes.fromhex(case["namespace"]), bytes.fromhex(case["chunk"])).hex()
            for case in GOLDEN["object_key"]
        ],
    }


def namespace_of(case: dict[str, Any]) -> Namespace:
    return msgspec.convert(case["namespace"], Namespace)


def golden() -> dict[str, list[str]]:
    """The same, as the file has it."""
    kinds = {kind: [case["hex"] for case in GOLDEN[kind]] for kind in ours() if kind != "chunks"}
    return kinds | {"chunks": [h for case in GOLDEN["chunks"] for h in case["hex"]]}


def test_the_keys_are_those_of_the_golden_file() -> None:
    assert ours() == golden()


def test_the_golden_file_follows_from_its_own_derivation() -> None:
    theirs = {
        "canonical": [encode(plain(case["value"])).hex() for case in GOLDEN["canonical"]],
        "digest": [tagged_digest(case["domain"], plain(case["value"])).hex() for case in GOLDEN["digest"]],
        "namespace": [tagged_digest("namespace", case["namespace"]).hex() for case in GOLDEN["namespace"]],
        "scope": [tagged_digest("scope", case["scope"]).hex() for case in GOLDEN["scope"]],
        "chunks": [h for case in GOLDEN["chunks"] for h in chain(case)],
        "object_key": [case["namespace"] + case["chunk"] for case in GOLDEN["object_key"]],
    }
    assert theirs == golden()


def test_the_golden_file_names_every_field() -> None:
    for case in GOLDEN["namespace"]:
        assert set(case["namespace"]) == set(Namespace.__struct_fields__)
    for case in GOLDEN["scope"]:
        assert set(case["scope"]) == set(Scope.__struct_fields__)


def test_keys_are_the_same_in_every_process_whatever_its_hash_seed() -> None:
    code = "import json, test_keys; print(json.dumps(test_keys.ours()))"
    processes = []
    for seed in ("0", "1", "4294967295", "random"):
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        processes.append(
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)
        )
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [json.loads(output) for output in outputs] == [golden()] * len(outputs)


# ------------------------------------------------------------------------------------------- canonical values

scalars = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def decode(data: bytes) -> Any:
    value, rest = take(data)
    assert rest == b""
    return value


def take(data: bytes) -> tuple[Any, bytes]:
    """A value off the front, and what is left. That there is such a function shows that no values collide."""
    tag, length = data[:1], int.from_bytes(data[1:9], "little")
    body, rest = data[9 : 9 + length], data[9 + length :]
    assert len(body) == length
    if tag in (b"l", b"m"):
        items = []
        while body:
            item, body = take(body)
            items.append(item)
        return (items if tag == b"l" else dict(zip(items[::2], items[1::2], strict=True))), rest
    scalar = {
        b"n": lambda: None,
        b"t": lambda: {b"1": True, b"0": False}[body],
        b"i": lambda: int(body),
        b"s": lambda: body.decode("utf-8", "surrogatepass"),
        b"b": lambda: body,
    }
    return scalar[tag](), rest


def typed(value: Any) -> Any:
    """``value`` such that True and 1, or a string and its bytes, are never equal."""
    if isinstance(value, Mapping):
        return {key: typed(item) for key, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value).__name__, value)


@given(values)
def test_an_encoding_tells_its_value_so_that_no_two_values_share_one(value: Any) -> None:
    assert typed(decode(canonical(value))) == typed(value)


@given(values, values)
def test_an_encoding_is_no_prefix_of_another(one: Any, other: Any) -> None:
    a, b = canonical(one), canonical(other)
    assert (a == b) == (typed(one) == typed(other))
    assert a == b or not b.startswith(a)


@given(st.dictionaries(st.text(max_size=4), scalars, max_size=6), st.randoms(use_true_random=False))
def test_the_order_in_which_a_mapping_was_filled_does_not_matter(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical(dict(items)) == canonical(value)


@pytest.mark.parametrize("value", [1.5, {1, 2}, object(), [1, 2.0], {"a": 0.0}, {"a": 1, 2: 3}, 1j])
def test_a_value_without_one_spelling_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        canonical(value)


def test_a_digest_of_one_domain_means_nothing_in_another() -> None:
    assert digest("scope", {"a": 1}) != digest("namespace", {"a": 1})


# -------------------------------------------------------------------------------------- namespaces and scopes

NAMESPACE = Namespace(
    model="m", revision="r", engine="e", format="f", dtype="d", block_size=16, chunk_size=256, kv_heads=4,
    head_size=64, page_bytes=(10, 20), packing="p", layers=("a", "b"), extra={"k": "v"},
)  # fmt: skip
OTHER: dict[str, Any] = {
    "model": "M", "revision": "r2", "engine": "x", "format": "f ", "dtype": "D", "block_size": 32,
    "chunk_size": 512, "kv_heads": 5, "head_size": 65, "page_bytes": (10, 21), "packing": "q",
    "layers": ("a", "c"), "group": 1, "groups": 2,
    "tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2, "extra": {"k": "w"},
}  # fmt: skip


@pytest.mark.parametrize("field", Namespace.__struct_fields__)
def test_any_other_field_of_a_namespace_gives_another_key(field: str) -> None:
    changed = msgspec.structs.replace(NAMESPACE, **{field: OTHER[field]})
    assert changed.digest() != NAMESPACE.digest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "ab", "revision": "c"}, {"model": "a", "revision": "bc"}),
        ({"page_bytes": (1, 2)}, {"page_bytes": (12,)}),
        ({"page_bytes": (1, 2)}, {"page_bytes": (2, 1)}),
        ({"layers": ("a", "b")}, {"layers": ("a,b",)}),
        ({"layers": ("a", "b")}, {"layers": ("ab",)}),
        ({"layers": ("",)}, {"layers": ()}),
        ({"extra": {"a": "b", "c": "d"}}, {"extra": {"a": "bcd"}}),
        ({"extra": {"a": ""}}, {"extra": {"": "a"}}),
        ({"tp_rank": 1, "pp_rank": 0}, {"tp_rank": 0, "pp_rank": 1}),
        ({"tp_rank": 1, "tp_size": 2, "group": 0}, {"tp_rank": 0, "tp_size": 2, "group": 1}),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}),
    ],
)
def test_what_moves_between_fields_of_a_namespace_gives_another_key(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = (msgspec.structs.replace(NAMESPACE, **fields) for fields in (one, other))
    assert first.digest() != second.digest()


def test_a_namespace_that_travelled_keeps_its_key() -> None:
    wire = msgspec.msgpack.encode(NAMESPACE)
    assert msgspec.msgpack.decode(wire, type=Namespace).digest() == NAMESPACE.digest()


def test_an_object_holds_every_layer_s_pages_of_a_chunk_s_blocks() -> None:
    assert NAMESPACE.object_bytes == 256 // 16 * (10 + 20)


SCOPES = [
    Scope(chunk_size=16),
    Scope(chunk_size=32),
    Scope(chunk_size=16, lora="a"),
    Scope(chunk_size=16, lora="b"),
    Scope(chunk_size=16, salt="a"),
    Scope(chunk_size=16, salt="b"),
    Scope(chunk_size=16, lora="ab"),
    Scope(chunk_size=16, lora="a", salt="b"),
    Scope(chunk_size=16, tags={"a": "b"}),
    Scope(chunk_size=16, tags={"b": "a"}),
    Scope(chunk_size=16, tags={"a": ""}),
    Scope(chunk_size=16, tags={"a": "b", "c": "d"}),
    Scope(chunk_size=16, tags={"a": "bcd"}),
]


def test_adapter_salt_and_tags_each_separate_equal_tokens() -> None:
    tokens = range(64)
    for place in (0, 1):
        assert len({chunk_hashes(tokens, scope)[place] for scope in SCOPES}) == len(SCOPES)


def test_every_field_of_a_scope_is_tried_above() -> None:
    assert {f for s in SCOPES for f in Scope.__struct_fields__ if getattr(s, f)} == set(
        Scope.__struct_fields__
    )


# ------------------------------------------------------------------------------------------- chains of chunks

SIZE = 4
SCOPE = Scope(chunk_size=SIZE)
token = st.integers(0, 2**32 - 1)
prompts = st.lists(token, max_size=6 * SIZE)
media_items = st.lists(
    st.builds(
        MediaItem, st.integers(0, 6 * SIZE), st.integers(1, 3 * SIZE), st.text("ab", min_size=1, max_size=3)
    ),
    max_size=3,
)


@given(prompts)
def test_each_complete_chunk_has_a_digest_and_a_partial_tail_has_none(tokens: list[int]) -> None:
    hashes = chunk_hashes(tokens, SCOPE)
    assert len(hashes) == len(tokens) // SIZE
    assert all(len(h) == DIGEST_BYTES for h in hashes)
    assert chunk_hashes(tokens[: len(hashes) * SIZE], SCOPE) == hashes


@given(prompts.filter(bool), st.data(), media_items)
def test_a_chunk_s_digest_depends_on_exactly_the_tokens_up_to_its_end(
    tokens: list[int], data: st.DataObject, media: list[MediaItem]
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[place] = data.draw(token.filter(lambda t: t != tokens[place]))
    before, after = (chunk_hashes(t, SCOPE, media=media) for t in (tokens, changed))
    same = place // SIZE
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


@given(prompts, prompts, media_items)
def test_what_follows_a_prefix_does_not_change_its_digests(
    tokens: list[int], tail: list[int], media: list[MediaItem]
) -> None:
    hashes = chunk_hashes(tokens, SCOPE, media=media)
    later = [MediaItem(len(tokens) + 1, 2, "later")]
    assert chunk_hashes([*tokens, *tail], SCOPE, media=[*media, *later])[: len(hashes)] == hashes


@given(st.lists(prompts, min_size=2, max_size=5))
def test_equal_digests_mean_equal_prefixes(many: list[list[int]]) -> None:
    seen: dict[bytes, tuple[int, ...]] = {}
    for tokens in many:
        for i, h in enumerate(chunk_hashes(tokens, SCOPE)):
            prefix = tuple(tokens[: (i + 1) * SIZE])
            assert seen.setdefault(h, prefix) == prefix


@given(prompts, st.data(), media_items)
def test_hashing_on_from_what_is_known_equals_hashing_from_scratch(
    tokens: list[int], data: st.DataObject, media: list[MediaItem]
) -> None:
    whole = chunk_hashes(tokens, SCOPE, media=media)
    known = whole[: data.draw(st.integers(0, len(whole)))]
    assert chunk_hashes(tokens, SCOPE, media=media, known=known) == whole
    forgotten = [0] * (len(known) * SIZE) + tokens[len(known) * SIZE :]
    assert chunk_hashes(forgotten, SCOPE, media=media, known=known) == whole


def test_more_known_digests_than_the_tokens_have_are_cut_off() -> None:
    whole = chunk_hashes(range(16), SCOPE)
    assert chunk_hashes(range(9), SCOPE, known=whole) == whole[:2]


@pytest.mark.parametrize(
    "tokens", [(7, 8, 9, 10), range(7, 11), array("I", range(7, 11)), array("q", range(7, 11))]
)
def test_tokens_may_come_in_any_sequence(tokens: Any) -> None:
    assert chunk_hashes(tokens, SCOPE) == chunk_hashes([7, 8, 9, 10], SCOPE)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_that_does_not_fit_is_refused_rather_than_cut(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token_id])


def test_the_chunk_size_alone_separates_chunks_of_equal_tokens() -> None:
    small, large = chunk_hashes([1] * 8, Scope(chunk_size=4)), chunk_hashes([1] * 8, Scope(chunk_size=8))
    assert not set(small) & set(large)


# ------------------------------------------------------------------------------------------------------ media

ONES = [1] * (4 * SIZE)  # an image's placeholders are all the same token


def with_media(*items: tuple[int, int, str]) -> list[bytes]:
    return chunk_hashes(ONES, SCOPE, media=[MediaItem(*item) for item in items])


@pytest.mark.parametrize(
    "other",
    ["f" * 63 + "e", "e" + "f" * 63, "f" * 48 + "0" + "f" * 15, "f" * 32, "F" * 64],
    ids=["last digit", "first digit", "beyond 64 bits", "half as long", "other case"],
)
def test_media_hashes_count_in_full_width(other: str) -> None:
    assert not set(with_media((0, 8, "f" * 64))) & set(with_media((0, 8, other)))


def test_the_same_image_gives_the_same_digests_again() -> None:
    assert with_media((2, 4, "x")) == with_media((2, 4, "x"))


def test_an_image_counts_from_the_first_chunk_that_it_touches_on() -> None:
    for item, first in (((4, 2, "x"), 1), ((3, 2, "x"), 0), ((0, 16, "x"), 0), ((15, 5, "x"), 3)):
        plain_hashes, hashes = with_media(), with_media(item)
        assert hashes[:first] == plain_hashes[:first], item
        assert not set(hashes[first:]) & set(plain_hashes[first:]), item


def test_where_an_image_lies_and_how_long_it_is_counts() -> None:
    variants = [((1, 2, "x"),), ((0, 2, "x"),), ((1, 3, "x"),), ((1, 2, "x"), (1, 2, "x"))]
    assert len({with_media(*items)[0] for items in variants}) == len(variants)


def test_two_images_in_the_other_order_are_another_prompt() -> None:
    assert with_media((0, 2, "x"), (2, 2, "y"))[0] != with_media((0, 2, "y"), (2, 2, "x"))[0]


# ------------------------------------------------------------------------------------------------ object keys


@given(*[st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)] * 4)
def test_an_object_s_key_is_unique_for_its_namespace_and_chunk(
    a: bytes, b: bytes, c: bytes, d: bytes
) -> None:
    assert (object_key(a, b) == object_key(c, d)) == ((a, b) == (c, d))
    assert len(object_key(a, b)) == 2 * DIGEST_BYTES
