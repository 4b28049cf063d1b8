"""Options of storage adapters: what is accepted, and one line for what is not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from lmcache.errors import ConfigError
from lmcache.v1.storage.l2.options import Folder, Size, read_options


class Options(msgspec.Struct, frozen=True, kw_only=True):
    path: Folder
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    seconds: float = 1.0
    direct: Literal["auto", "on", "off"] = "auto"
    part: Size = Size(4)
    hosts: list[str] = []
    password: str = ""

    def __post_init__(self) -> None:
        if self.direct == "on" and self.threads == 13:
            raise ValueError("threads=13: not with direct=on")


def read(**options: Any) -> Options:
    return read_options("disk", Options, options)


def test_defaults_hold_and_numbers_are_read() -> None:
    assert read(path="/x", seconds=2) == Options(path="/x", seconds=2.0)


def test_a_directory_may_be_below_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    assert read(path="~/kv").path == "/users/me/kv"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        (0, 0),
        ("7", 7),
        ("7B", 7),
        ("64MiB", 64 << 20),
        ("64 MB", 64_000_000),
        ("1.5GiB", 3 << 29),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes_in_their_spellings(text: Any, size: int) -> None:
    assert read(path="/x", part=text).part == size


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": "/x", "thread": 3}, "no such option 'thread'; did you mean threads?"),
        ({"path": "/x", "zzz": 3}, "no such option 'zzz'; expected one of path, threads"),
        ({}, "path: missing"),
        ({"path": 3}, "path=3: expected a directory, e.g. /var/cache/lmcache"),
        ({"path": ""}, "path='': expected a directory"),
        ({"path": "/x" * 2500}, "expected a directory"),
        ({"path": "a\0b"}, "expected a directory"),
        ({"path": "/x", "threads": 0}, "threads=0: expected a whole number >= 1"),
        ({"path": "/x", "threads": True}, "threads=True: expected a whole number"),
        ({"path": "/x", "seconds": float("nan")}, "seconds=nan: expected a finite number"),
        ({"path": "/x", "direct": "maybe"}, "direct='maybe': expected one of auto, on, off"),
        ({"path": "/x", "part": "much"}, "part='much': expected bytes"),
        ({"path": "/x", "part": -1}, "part=-1: expected bytes"),
        ({"path": "/x", "part": True}, "part=True: expected bytes"),
        ({"path": "/x", "hosts": ["a", 1]}, "hosts=['a', 1]: expected text at [1]"),
        ({"path": "/x", "password": 12345}, "password=…: expected text"),
        ({"path": "/x", "direct": "on", "threads": 13}, "threads=13: not with direct=on"),
    ],
)
def test_every_mistake_is_one_line_that_names_the_key(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**options)
    text = str(caught.value)
    assert text.startswith("--l2-adapter disk: ")
    assert "\n" not in text
    assert says in text
    assert "12345" not in text
