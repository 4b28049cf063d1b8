"""SGLang in miniature: its pools, its slots, and the calls its radix cache makes, on KV that tells its tokens.

The order of calls is that of ``LMCacheUnifiedRadixCache`` (SGLang 0.5.23): lookup, poll, release of what the engine
has itself, load, store, end. What a slot must hold follows from the tokens up to it, so a wrong hit is seen.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lmcache.integration.sglang.unified_lmcache_mp_connector import UnifiedLMCacheMPConnector

LAYERS, HEADS, WIDTH = 2, 2, 4
DEADLINE = 20.0
MIN = torch.distributed.ReduceOp.MIN if torch.distributed.is_available() else None


def names(*components: str) -> tuple[Any, ...]:
    """SGLang's ``ComponentType`` members."""
    return tuple(SimpleNamespace(name=name) for name in components)


def model(mla: bool = False, **fields: Any) -> Any:
    """What is read of SGLang's ``ModelConfig``."""
    defaults: dict[str, Any] = {
        "model_path": "tests/no-such-model", "revision": None, "dtype": "float32", "quantization": None,
        "context_len": 4096, "hf_config": None, "attention_arch": SimpleNamespace(name="MLA" if mla else "MHA"),
        "num_hidden_layers": LAYERS, "head_dim": WIDTH, "get_num_kv_heads": lambda tp: HEADS // tp,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | fields))


def pool(kind: str, slots: int, page: int, heads: int = HEADS) -> Any:
    """A pool of ``slots`` slots and the padding page, as SGLang lays them out."""
    rows = slots + page
    if kind == "swa":
        inner = {"full_kv_pool": pool("mha", slots, page), "swa_kv_pool": pool("mha", slots, page)}
        return SimpleNamespace(**inner)
    if kind == "mha":
        k, v = ([torch.zeros(rows, heads, WIDTH) for _ in range(LAYERS)] for _ in "kv")
        return SimpleNamespace(k_buffer=k, v_buffer=v, start_layer=0, kv_cache_layout="nhd")
    found = SimpleNamespace(kv_buffer=[torch.zeros(rows, 1, WIDTH) for _ in range(LAYERS)], start_layer=0)
    if kind == "dsa":
        found.index_k_with_scale_buffer = [
            torch.zeros(rows // page + 1, page * 3, dtype=torch.uint8) for _ in range(LAYERS)
        ]
    return found


class Slots:
    """SGLang's allocator: whole pages, the first of which is never given out."""

    def __init__(self, kind: str, slots: int, page: int, heads: int = HEADS) -> None:
        self.page = page
        self.pool = pool(kind, slots, page, heads)
        self.free_pages = list(range(1, slots // page + 1))[::-1]
        self.swa_of = torch.zeros(slots + page, dtype=torch.int64)
        """Slot of the sliding window's pool, by slot; 0: none."""

    def get_kvcache(self) -> Any:
        return self.pool

    def alloc(self, tokens: int) -> torch.Tensor:
        pages = [self.free_pages.pop() for _ in range(tokens // self.page)]
        slots = torch.tensor([p * self.page + i for p in pages for i in range(self.page)], dtype=torch.int64)
        self.swa_of[slots] = slots  # the same number in the other pool, which is as large
        return slots

    def free(self, slots: torch.Tensor) -> None:
        self.free_pages += [int(slot) // self.page for slot in slots[:: self.page]]

    def translate_loc_from_full_to_swa(self, slots: torch.Tensor) -> torch.Tensor:
        return self.swa_of[slots].to(torch.int32)


def _base(tokens: Sequence[int]) -> torch.Tensor:
    state, values = 0, []
    for token in tokens:
        state = zlib.crc32(int(token).to_bytes(4, "little"), state)
        values.append(state % 65521 * 64)
    return torch.tensor(values, dtype=torch.float64)


class MiniSGLang:
    """One rank of an engine.

    Args:
        address: of the server.
        folder: for the configuration file.
        ranks: arguments of the connector that say which rank this is.
        settings: keys ``lmcache.mp.*``, without the prefix.
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        kind: str = "mha",
        page: int = 4,
        slots: int = 256,
        window: int | None = None,
        config: Any = None,
        ranks: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        settings = {"model_revision": "r1", "mq_timeout": 1.0, **settings}
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        file = folder / f"mp-{id(self)}.yaml"
        lines = [f"mp_host: {host}", f"mp_port: {port}", "extra_config:"]
        lines += [f"  lmcache.mp.{key}: {str(value).lower()}" for key, value in settings.items()]
        file.write_text("\n".join(lines))
        self.kind, self.page = kind, page
        given = {"tp_size": 1, "tp_rank": 0, "tp_group": None, **(ranks or {})}
        self.rank = given["tp_rank"] + given.get("pp_rank", 0)
        self.slots = Slots(kind, slots, page)
        self.capacity = len(self.slots.free_pages)
        self.connector = UnifiedLMCacheMPConnector(
            config_file=str(file), model_config=config or model(mla=kind in ("mla", "dsa")), page_size=page,
            token_to_kv_pool_allocator=self.slots, req_to_token_pool=None,
            tree_components=names("FULL", "SWA") if kind == "swa" else names("FULL"), mamba_component=None,
            sliding_window_size=window, **given,
        )  # fmt: skip

    # ---- KV

    def _tensors(self) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """Number and tensor of each layer and plane, and whether it is of the sliding window's pool."""
        pools = [(self.slots.pool, False)]
        if self.kind == "swa":
            pools = [(self.slots.pool.full_kv_pool, False), (self.slots.pool.swa_kv_pool, True)]
        at = 0
        for one, swa in pools:
            for attr in ("k_buffer", "v_buffer", "kv_buffer"):
                for tensor in getattr(one, attr, ()):
                    yield at, tensor, swa
                    at += 1

    def compute(self, tokens: Sequence[int], slots: torch.Tensor, start: int = 0) -> None:
        """What a forward pass writes for tokens from ``start`` on."""
        base = _base(tokens)[start:]
        for at, tensor, _ in self._tensors():
            rank = 0 if self.kind in ("mla", "dsa") else self.rank
            value = base[:, None, None] + at * 4 + rank * 32 + torch.arange(WIDTH) % 4
            tensor[slots] = value.to(tensor.dtype).expand(-1, tensor.shape[1], -1)
        for layer, tensor in enumerate(getattr(self.slots.pool, "index_k_with_scale_buffer", ())):
            last = base[self.page - 1 :: self.page].to(torch.int64)
            tensor[slots[:: self.page] // self.page] = ((last + layer) % 251).to(torch.uint8)[:, None]

    def holds(self, tokens: Sequence[int], slots: torch.Tensor, start: int = 0, window: int = 0) -> bool:
        """Whether the slots hold these tokens' KV; of the sliding window only the last ``window`` tokens."""
        mine = [(t.clone(), s) for _, t, s in self._tensors()]
        sidecar = [t.clone() for t in getattr(self.slots.pool, "index_k_with_scale_buffer", ())]
        self.compute(tokens, slots, start)
        same = all(
            torch.equal(
                was[slots[-window:] if swa and window else slots],
                now[slots[-window:] if swa and window else slots],
            )
            for (was, swa), (_, now, _) in zip(mine, self._tensors(), strict=True)
        )
        pages = slots[:: self.page] // self.page
        now_sidecar = getattr(self.slots.pool, "index_k_with_scale_buffer", ())
        same &= all(torch.equal(a[pages], b[pages]) for a, b in zip(sidecar, now_sidecar, strict=True))
        for (was, _), (_, now, _) in zip(mine, self._tensors(), strict=True):
            now.copy_(was)
        for a, b in zip(sidecar, now_sidecar, strict=True):
            b.copy_(a)
        return same

    def _scrub(self, slots: torch.Tensor) -> None:
        """So that nobody finds here what was to be loaded."""
        self.slots.swa_of[slots] = 0
        for _, tensor, _ in self._tensors():
            tensor[slots] = -1
        for tensor in getattr(self.slots.pool, "index_k_with_scale_buffer", ()):
            tensor[slots // self.page] = 255

    # ---- the steps of a request

    def look_up(
        self, rid: str, tokens: Sequence[int], local: int = 0, salt: str = "", extra: str = ""
    ) -> Any:
        """Submit a lookup and poll it to its end; the operation."""
        key = self.connector.build_cache_salt(salt or None, extra or None)
        op = self.connector.submit_lookup(rid, tokens, local_hit_tokens=local, cache_salt=key)
        until = time.monotonic() + DEADLINE
        while self.connector.poll_lookup(op) is None:
            assert time.monotonic() < until, "no answer to a lookup"
        return op

    def free_local(self, op: Any, local: int) -> None:
        """As SGLang does with what its own tree holds."""
        size = self.connector.chunk_size
        end = min(op.total_hit_tokens, local // size * size)
        if end > 0:
            self.connector.free_lookup_locks(op.request_id, start=0, end=end)

    def load(self, op: Any, local: int = 0) -> tuple[Any, torch.Tensor, bool]:
        """Submit a load; the operation, its slots, and whether the forward pass may use them."""
        slots = self.slots.alloc(op.total_hit_tokens - local)
        if self.kind == "swa":  # only the window's tail has slots there
            self.slots.swa_of[slots[: -self.connector.aligned_swa_window_size()]] = 0
        load = self.connector.submit_load(
            op, self.connector.device_indices_by_group(slots), local_hit_tokens=local,
            owned_device_indices=slots, producer_stream=None,
        )  # fmt: skip
        return load, slots, self.connector.prepare_load_on_stream(load, None)

    def submit_store(
        self, rid: str, tokens: Sequence[int], slots: torch.Tensor, salt: str = "", extra: str = ""
    ) -> Any:
        connector = self.connector
        end = len(tokens) // connector.chunk_size * connector.chunk_size
        start = connector.get_store_start(rid, end)
        if end <= start:
            return None
        return connector.submit_store(
            rid, tokens[:end], connector.device_indices_by_group(slots[start:end]),
            device_indices_start=start, cache_salt=connector.build_cache_salt(salt or None, extra or None),
        )  # fmt: skip

    def settle(self, *operations: Any) -> None:
        """Wait until operations have ended on every rank."""
        until = time.monotonic() + DEADLINE
        while self.connector.ready_prefix_count(operations) < len(operations):
            assert time.monotonic() < until, "an operation did not end"

    def run(self, rid: str, tokens: Sequence[int], local: int = 0, salt: str = "", extra: str = "") -> int:
        """A whole request, of which the engine's own tree has the first ``local`` tokens; how many tokens came from
        the server. What it loads is checked, what it computes is stored."""
        whole = len(tokens) // self.page * self.page
        own = self.slots.alloc(local)
        self.compute(tokens[:local], own)
        op = self.look_up(rid, tokens[:whole], local, salt, extra)
        self.free_local(op, local)
        total, slots, came = op.total_hit_tokens or 0, own, 0
        if total > local:
            load, slots, usable = self.load(op, local)
            if usable:
                self.settle(load)
                usable = self.connector.complete_load(load)
            if usable:
                window = self.connector.aligned_swa_window_size()
                assert self.holds(tokens[:total], slots, local, window), f"{rid}: wrong KV"
                came, slots = total - local, torch.cat([own, slots])
            else:
                self.slots.free(slots)
                slots = own
        more = self.slots.alloc(whole - len(slots))
        self.compute(tokens[:whole], more, len(slots))
        slots = torch.cat([slots, more])
        store = self.submit_store(rid, tokens[:whole], slots, salt, extra)
        if store is not None:
            self.settle(store)
            self.connector.complete_store(store)
        self.connector.finish_request(rid)
        self._scrub(slots)
        self.slots.free(slots)
        assert len(self.slots.free_pages) == self.capacity, f"{rid}: slots leaked"
        return came

    def close(self) -> None:
        self.connector.close()


@contextmanager
def mini_sglang(*args: Any, **kwargs: Any) -> Iterator[MiniSGLang]:
    """An engine of one rank; closed at the end."""
    engine = MiniSGLang(*args, **kwargs)
    try:
        yield engine
    finally:
        engine.close()
