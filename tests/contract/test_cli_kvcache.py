"""The verbs that manage what a server holds: list, clear, pin, unpin, warm, quotas; and what ``describe`` says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.forked_server import ForkedServer
from helpers.server import http_get, namespace, wait_for
from helpers.stubs import stub_server
from helpers.tier_load import Stranger
from lmcache.cli.main import main
from lmcache.v1.keys import account_id
from lmcache.v1.multiprocess.server.metrics import TIER_COUNTERS, TIER_GAUGES
from lmcache.v1.protocol import messages as m

TOKENS = list(range(1300))
LIST = ",".join(map(str, TOKENS))
CHUNKS = 5
BYTES = 64 << 10
"""Of one object."""
TERMINAL_CONTROL = "\x1b"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    folder = tmp_path_factory.mktemp("tiers")
    adapter = json.dumps({"type": "disk", "path": str(folder / "disk"), "max_gb": 0.05})
    with ForkedServer(folder / "log", l1_size_gb=0.02, l2_adapter=(adapter,)) as running:
        yield running


@pytest.fixture
def engine(server: ForkedServer) -> Iterator[Stranger]:
    """An engine at an empty server without quotas."""
    with Stranger(server.address, "e") as stranger:
        for row in stranger.ask(m.Quotas()).rows:
            stranger.ask(m.SetQuota(account=row.account, limit_bytes=None, tier=row.tier))
        stranger.ask(m.Clear(force=True))
        yield stranger


class Cli:
    """Runs a verb in this process, at the server."""

    def __init__(self, capsys: pytest.CaptureFixture[str], address: str) -> None:
        self._capsys = capsys
        self._address = address

    def __call__(self, *argv: str, code: int = 0) -> str:
        assert main([*argv, "--host", self._address]) == code
        out, err = self._capsys.readouterr()
        assert err == ""
        return out

    def json(self, *argv: str, code: int = 0) -> dict[str, Any]:
        out = self(*argv, "--format", "json", code=code)
        assert out.count("\n") == 1
        return dict(json.loads(out))

    def fails(self, *argv: str, code: int = 2) -> str:
        assert main([*argv, "--host", self._address]) == code
        out, err = self._capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1, err
        return err


@pytest.fixture
def cli(server: ForkedServer, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys, server.address)


def written(engine: Stranger) -> None:
    wait_for(lambda: engine.ask(m.Status()).fields["l2"][0]["queued_objects"] == 0, what="written behind")


def stored(engine: Stranger, **scope: Any) -> list[bytes]:
    hashes = engine.hashes(TOKENS, **scope)
    assert engine.store(hashes, account_id(scope.get("salt", ""))) == CHUNKS
    written(engine)
    return hashes


# ---- list


def test_list_shows_each_object_of_l1_in_pages_by_account(cli: Cli, engine: Stranger) -> None:
    assert cli("kvcache", "list") == "nothing\n"
    stored(engine)
    stored(engine, salt="a")
    told = cli.json("kvcache", "list")
    assert len(told["objects"]) == 2 * CHUNKS
    assert not told["more"]
    keys = [row["key"] for row in told["objects"]]
    assert keys == sorted(set(keys))
    assert {row["model"] for row in told["objects"]} == {"load"}
    assert {row["bytes"] for row in told["objects"]} == {BYTES}
    mine = cli.json("kvcache", "list", "--salt", "a")["objects"]
    assert {row["account"] for row in mine} == {account_id("a")}
    assert len(mine) == CHUNKS
    assert cli.json("kvcache", "list", "--account", account_id("a"))["objects"] == mine
    few = cli.json("kvcache", "list", "--limit", "3")
    assert (few["more"], [row["key"] for row in few["objects"]]) == (True, keys[:3])
    text = cli("kvcache", "list", "--limit", "3")
    assert text.splitlines()[-1] == "and more; --limit 3"
    assert keys[0][-16:] in text


def test_a_list_longer_than_a_page_is_whole(cli: Cli, server: ForkedServer, engine: Stranger) -> None:
    with Stranger(server.address, "small", namespace("small", page_bytes=(64,))) as small:
        for first in range(11):
            chunks = [bytes([first, i]) * 16 for i in range(100)]
            assert small.store(chunks) == 100
        written(small)  # what waits to be written stays in L1, also for the next test
    told = cli.json("kvcache", "list", "--limit", "5000")
    keys = [row["key"] for row in told["objects"]]
    assert (len(keys), keys, told["more"]) == (1100, sorted(set(keys)), False)


def test_a_tier_s_objects_are_listed_too_with_whose_they_are(cli: Cli, engine: Stranger) -> None:
    stored(engine)
    stored(engine, salt="a")
    in_l1 = [(row["key"], row["account"]) for row in cli.json("kvcache", "list")["objects"]]
    told = cli.json("kvcache", "list", "--tier", "disk")["objects"]
    assert [(row["key"], row["account"]) for row in told] == in_l1
    assert all(row["bytes"] > BYTES for row in told), "with their headers"
    text = cli("kvcache", "list", "--tier", "disk")
    assert (text.count(account_id("a")), text.count("(no salt)")) == (CHUNKS, CHUNKS)
    mine = cli.json("kvcache", "list", "--tier", "disk", "--salt", "a", "--limit", "3")
    assert [row for row in told if row["account"] == account_id("a")][:3] == mine["objects"]
    assert mine["more"]
    assert "expected one of" in cli.fails("kvcache", "list", "--tier", "nvme", code=1)


# ---- clear


def test_clear_drops_from_all_tiers_or_from_those_named(cli: Cli, engine: Stranger) -> None:
    hashes = stored(engine)
    assert cli.json("kvcache", "clear", "--tier", "l1")["tiers"] == {"l1": CHUNKS}
    assert engine.find(hashes) == CHUNKS, "from disk"
    told = cli.json("kvcache", "clear", "--tier", "disk")
    assert (told["tiers"], told["dropped"]) == ({"disk": CHUNKS}, CHUNKS)
    assert engine.find(hashes, wait=-1) == CHUNKS, "from L1"
    stored_again = stored(engine, salt="x")
    text = cli("kvcache", "clear")
    assert "objects dropped (l1 10, disk 5)" in text
    assert engine.find(hashes) == engine.find(stored_again) == 0


def test_clear_of_an_account_leaves_the_others(cli: Cli, engine: Stranger) -> None:
    mine, others = stored(engine, salt="a"), stored(engine, salt="b")
    assert cli.json("kvcache", "clear", "--salt", "a")["tiers"] == {"l1": CHUNKS, "disk": CHUNKS}
    assert (engine.find(mine), engine.find(others)) == (0, CHUNKS)


def test_an_unknown_tier_is_named_with_those_there_are(cli: Cli) -> None:
    unknown = cli.fails("kvcache", "clear", "--tier", "l1", "--tier", "nvme", code=1)
    assert "tier 'nvme': expected one of l1, disk (bad_request)" in unknown


# ---- pin, unpin, warm


def test_a_pinned_prompt_survives_a_clear_until_it_is_unpinned_or_forced(cli: Cli, engine: Stranger) -> None:
    hashes = stored(engine)
    stored(engine, salt="other")
    assert cli.json("kvcache", "pin", "--tokens", LIST)["pinned"] == CHUNKS
    assert cli.json("kvcache", "clear")["tiers"]["l1"] == CHUNKS
    assert engine.find(hashes, wait=-1) == CHUNKS
    assert {row["pinned"] for row in cli.json("kvcache", "list")["objects"]} == {True}
    assert "5 objects unpinned" in cli("kvcache", "unpin", "--tokens", LIST)
    assert cli.json("kvcache", "clear")["tiers"]["l1"] == CHUNKS
    stored(engine)
    cli("kvcache", "pin", "--tokens", LIST)
    assert cli.json("kvcache", "clear", "--force")["tiers"]["l1"] == CHUNKS


def test_pinning_what_l1_does_not_hold_says_so_and_is_no_success(cli: Cli, engine: Stranger) -> None:
    text = cli("kvcache", "pin", "--tokens", LIST, "--salt", "nobody", code=1)
    assert "L1 holds nothing of these 5 chunks; nothing is pinned" in text


def test_warm_brings_a_prompt_from_disk_to_l1_and_says_what_is_there(cli: Cli, engine: Stranger) -> None:
    hashes = stored(engine, salt="a")
    cli("kvcache", "clear", "--tier", "l1")
    assert engine.find(hashes, wait=-1) == 0  # which fetches behind; so once more
    wait_for(lambda: engine.find(hashes, wait=-1) == CHUNKS, what="fetched behind")
    cli("kvcache", "clear", "--tier", "l1")
    prompt = ("--tokens", LIST, "--salt", "a")
    told = cli.json("query", "kvcache", *prompt)
    assert {row["tier"]: row["tokens"] for row in told["models"] if row["model"] == "load"} == {
        "L1": 0,
        "disk": CHUNKS * 256,
    }
    told = cli.json("kvcache", "warm", *prompt)
    assert {row["tier"]: row["tokens"] for row in told["models"] if row["model"] == "load"} == {
        "L1": CHUNKS * 256,
        "disk": CHUNKS * 256,
    }
    assert cli.json("quota", "get", "a")["objects"] == CHUNKS
    assert "1280" in cli("kvcache", "warm", *prompt)


# ---- quotas


def test_a_quota_limits_what_its_account_holds_in_l1_and_nobody_else(cli: Cli, engine: Stranger) -> None:
    told = cli.json("quota", "set", "a", "--limit-gb", str(3 * BYTES / 2**30))
    assert told["limit_bytes"] == 3 * BYTES
    for salt in ("a", "b"):
        engine.store(engine.hashes(TOKENS, salt=salt), account_id(salt))
    use = {row["account"]: row for row in cli.json("quota", "list")["accounts"]}
    assert use[account_id("a")]["used_bytes"] <= 3 * BYTES
    assert use[account_id("a")]["limit_bytes"] == 3 * BYTES
    assert (use[account_id("b")]["objects"], use[account_id("b")]["limit_bytes"]) == (CHUNKS, None)
    written(engine)
    assert engine.find(engine.hashes(TOKENS, salt="b")) == CHUNKS


def test_a_quota_is_shown_and_lifted_by_salt_or_account_and_the_salt_is_never_shown(
    cli: Cli, engine: Stranger
) -> None:
    salt = "s3cret-salt"
    cli("quota", "set", salt, "--limit-gb", "1.5")
    cli("quota", "set", "", "--limit-gb", "1")
    texts = [cli("quota", "list"), cli("describe", "kvcache"), cli("quota", "get", salt)]
    assert all("1.50 GiB" in text and salt not in text for text in texts)
    assert "(no salt)" in texts[0]
    assert cli.json("quota", "get", "--account", account_id(salt))["limit_bytes"] == 3 << 29
    assert cli.json("quota", "delete", salt)["limit_bytes"] is None
    assert cli.json("quota", "get", salt)["limit_bytes"] is None
    cli("quota", "delete", salt)
    cli("quota", "delete", "")
    assert cli.json("quota", "list")["accounts"] == []
    assert "no account has anything here, or a limit" in cli("quota", "list")


def test_a_quota_of_a_tier_holds_there_and_is_shown_and_lifted_there(
    cli: Cli, engine: Stranger, server: ForkedServer
) -> None:
    a, on_disk = account_id("a"), BYTES + 4096
    limit = ("--limit-gb", str(3 * on_disk / 2**30), "--tier", "disk")
    assert f"account {a} limited to" in (text := cli("quota", "set", "a", *limit))
    assert text.endswith("in disk\n")
    for salt in ("a", "b"):
        engine.store(engine.hashes(TOKENS, salt=salt), account_id(salt))
        written(engine)
    use = {row["account"]: row for row in cli.json("quota", "list")["accounts"]}
    assert (use[a]["objects"], use[a]["limit_bytes"]) == (CHUNKS, None), "L1 has no limit"
    (mine,), (others,) = use[a]["tiers"], use[account_id("b")]["tiers"]
    assert mine == {"tier": "disk", "limit_bytes": 3 * on_disk, "used_bytes": 3 * on_disk, "objects": 3}
    assert others == {"tier": "disk", "limit_bytes": None, "used_bytes": CHUNKS * on_disk, "objects": CHUNKS}
    assert cli.json("quota", "get", "a")["tiers"] == [mine]
    (row,) = cli.json("describe", "kvcache")["l2"]
    assert sum(account["used_bytes"] for account in row["accounts"]) == row["used_bytes"]
    assert row["over_quota"] == CHUNKS - 3
    for text in (cli("quota", "list"), cli("describe", "kvcache")):
        assert [line.split()[:2] for line in text.splitlines() if line.startswith(a)] == [
            [a, "l1"],
            [a, "disk"],
        ]
    _, metrics = http_get(f"{server.ready.http}/metrics")
    assert f'lmcache_mp_account_used_bytes{{account="{a}",tier="disk"}} {3.0 * on_disk}' in metrics
    assert f'lmcache_mp_account_limit_bytes{{account="{a}",tier="disk"}} {3.0 * on_disk}' in metrics
    assert account_id("b") not in metrics, "there may be thousands without a limit"
    cli("quota", "set", "b", "--limit-gb", "0", "--tier", "disk")
    wait_for(lambda: cli.json("quota", "get", "b")["tiers"][0]["objects"] == 0, what="evicted at once")
    assert cli.json("quota", "get", "b")["objects"] == CHUNKS, "in L1"
    assert cli("quota", "delete", "a", "--tier", "disk").endswith("has no limit in disk\n")
    assert cli.json("quota", "get", "a")["tiers"][0]["limit_bytes"] is None


def test_a_killed_server_s_accounts_are_known_to_the_next_which_keeps_its_own_quotas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, on_disk = account_id("a"), account_id("b"), BYTES + 4096
    spec: dict[str, Any] = {"type": "disk", "path": str(tmp_path / "disk"), "max_gb": 0.05}

    def in_tier(cli: Cli) -> dict[str, tuple[int, int]]:
        rows = cli.json("quota", "list")["accounts"]
        return {row["account"]: (t["objects"], t["limit_bytes"]) for row in rows for t in row["tiers"]}

    with ForkedServer(tmp_path / "log", l1_size_gb=0.02, l2_adapter=(json.dumps(spec),)) as server:
        with Stranger(server.address, "e") as engine:
            for salt in ("a", "b"):
                engine.store(engine.hashes(TOKENS, salt=salt), account_id(salt))
            written(engine)
        cli = Cli(capsys, server.address)
        cli("quota", "set", "a", "--limit-gb", "0.01", "--tier", "disk")
        assert in_tier(cli) == {a: (CHUNKS, int(0.01 * 2**30)), b: (CHUNKS, None)}
        server.kill()
    spec["quotas_gb"] = {b: 3 * on_disk / 2**30}
    with ForkedServer(tmp_path / "log", l1_size_gb=0.02, l2_adapter=(json.dumps(spec),)) as server:
        cli = Cli(capsys, server.address)
        wait_for(lambda: in_tier(cli) == {a: (CHUNKS, None), b: (3, 3 * on_disk)}, what="down to the quota")
        (row,) = cli.json("describe", "kvcache")["l2"]
        assert (row["objects"], row["used_bytes"]) == (CHUNKS + 3, (CHUNKS + 3) * on_disk)
        with Stranger(server.address, "e") as engine:
            assert engine.find(engine.hashes(TOKENS, salt="a")) == CHUNKS


def test_a_quota_where_there_can_be_none_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = json.dumps({"type": "shared_fs", "path": str(tmp_path / "shared")})
    with ForkedServer(tmp_path / "log", l1_size_gb=0.01, l2_adapter=(shared,)) as server:
        cli = Cli(capsys, server.address)
        refused = cli.fails("quota", "set", "a", "--limit-gb", "1", "--tier", "shared_fs", code=1)
        assert "tier 'shared_fs': others store there, too, so nobody knows what one account has;" in refused
        assert "limit accounts in l1, or in a tier of type disk" in refused
        unknown = cli.fails("quota", "set", "a", "--limit-gb", "1", "--tier", "nvme", code=1)
        assert "tier 'nvme': expected one of l1, shared_fs" in unknown
        assert cli.json("quota", "list")["accounts"] == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["quota", "set", "a"], "required: --limit-gb"),
        (["quota", "set", "a", "--limit-gb", "-1"], "--limit-gb -1: expected a number of GiB from 0 on"),
        (["quota", "set", "a", "--limit-gb", "nan"], "--limit-gb nan: expected"),
        (["quota", "set", "--limit-gb", "1"], "account: expected exactly one of SALT, --account ID"),
        (["quota", "get", "a", "--account", "b"], "account: expected exactly one of SALT, --account ID"),
        (["quota", "delete"], "account: expected exactly one of"),
        (["quota", "lst"], "unknown verb 'lst': did you mean list?"),
        (["kvcache", "list", "--limit", "0"], "--limit: '0': expected a whole number of at least 1"),
        (["kvcache", "list", "--salt", "a", "--account", "b"], "--salt and --account: expected one of them"),
        (["kvcache", "pin"], "prompt given by none"),
        (["kvcache", "warm", "--tokens", "1", "--wait", "0"], "--wait: '0': expected seconds above 0"),
        (["describe", "server"], "describe server: expected nothing, or kvcache"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_usage_error_is_one_line(cli: Cli, argv: list[str], text: str) -> None:
    assert text in cli.fails(*argv)


@pytest.mark.parametrize("account", [TERMINAL_CONTROL, "x" * 65])
def test_an_account_that_is_none_is_refused(cli: Cli, account: str) -> None:
    line = cli.fails("quota", "set", "--account", account, "--limit-gb", "1", code=1)
    assert "expected up to 64 printable characters" in line


def test_a_server_that_does_not_know_a_verb_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    welcome = m.encode(m.Welcome(protocol=1, epoch="e", session="s", chunk_size=256, version="1"))
    error = m.encode(m.Error(code="malformed", message="message cannot be read: invalid value 'quotas'"))
    with stub_server(lambda message: welcome if b"hello" in message else error) as address:
        assert main(["quota", "list", "--host", address]) == 1
    assert "refuses: message cannot be read" in capsys.readouterr().err


def test_a_server_that_waits_for_a_slow_tier_is_not_taken_for_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    welcome = m.encode(m.Welcome(protocol=2, epoch="e", session="s", chunk_size=256, version="1"))
    with stub_server(lambda message: welcome if b"hello" in message else None) as address:
        asked = ["kvcache", "clear", "--host", address, "--timeout", "2", "--wait", "0.01"]
        assert main(asked) == 1
    err = capsys.readouterr().err
    assert f"the server at {address} has not answered within 2.01 s" in err
    assert "may go on there" in err
    assert "is `lmcache server` running" not in err


# ---- describe, metrics


def test_describe_kvcache_shows_l1_tiers_and_accounts(cli: Cli, engine: Stranger) -> None:
    stored(engine, salt="a")
    told = cli.json("describe", "kvcache")
    assert set(told) == {"address", "epoch", "chunk_size", "l1", "l2", "accounts"}
    (row,) = told["l2"]
    assert (row["name"], row["state"], row["objects"]) == ("disk", "up", CHUNKS)
    assert told["accounts"][0]["account"] == account_id("a")
    text = cli("describe", "kvcache")
    assert "L1 in use" in text
    assert any(line.split()[:3] == ["disk", "disk", "up"] for line in text.splitlines())
    assert "disk" in cli("describe")


def test_every_series_of_a_tier_is_there_from_the_start(server: ForkedServer) -> None:
    _, body = http_get(f"{server.ready.http}/metrics")
    for name in TIER_GAUGES:
        assert f'lmcache_mp_l2_{name}{{tier="disk"}}' in body
    for name in TIER_COUNTERS:
        assert f'lmcache_mp_l2_{name}_total{{tier="disk"}}' in body
    assert 'lmcache_mp_l2_up{tier="disk"} 1.0' in body


def test_a_server_without_tiers_tells_of_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ForkedServer(tmp_path / "log", l1_size_gb=0.01) as bare:
        assert "lmcache_mp_l2_up{" not in http_get(f"{bare.ready.http}/metrics")[1]
        assert main(["describe", "kvcache", "--host", bare.address, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["l2"] == []
        with Stranger(bare.address, "e") as stranger:
            hashes = stranger.hashes(TOKENS)
            stranger.store(hashes)
            assert stranger.find(hashes) == CHUNKS
            assert stranger.ask(m.Clear()).counts == {"l1": CHUNKS}
            assert stranger.find(hashes) == 0
