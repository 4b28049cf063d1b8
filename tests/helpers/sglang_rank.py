"""One of two ranks (tensor-parallel, or stages) of SGLang in miniature, as a process; what it was told, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.sglang_engine import MiniSGLang


def scenario(engine: MiniSGLang, rank: int, first: int) -> dict[str, Any]:
    """The same calls on every rank, but for what their trees hold and what goes wrong on one."""
    tokens = list(range(first, first + 70))
    connector = engine.connector
    told: dict[str, Any] = {"alone": engine.run("a", tokens), "again": engine.run("b", tokens)}

    # Trees differ: the shortest prefix of its own decides, as in SGLang's check_prefetch_progress.
    local = torch.tensor([20 + 20 * rank])
    connector.parallel_all_reduce(local, torch.distributed.ReduceOp.MIN)
    told["uneven"] = engine.run("c", tokens, local=int(local))

    op = engine.look_up("d", tokens[:68])
    wrong = torch.arange(rank, rank + 64)  # rank 1's are not whole pages
    load = connector.submit_load(op, wrong + engine.page, local_hit_tokens=0)
    told["one rank fails"] = [connector.prepare_load_on_stream(load, None), connector.complete_load(load)]
    connector.finish_request("d")
    told["after"] = engine.run("e", tokens)

    other = list(range(first + 500, first + 532))
    told["stored by one that cannot"] = connector.submit_store(
        "f", other, torch.arange(rank, rank + 32) + engine.page, device_indices_start=0, cache_salt=""
    )
    connector.finish_request("f")
    return told


def main() -> None:
    address, folder, kind, rank, first = sys.argv[1:]
    store = torch.distributed.FileStore(str(Path(folder, "store")), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    mine = Path(folder, rank)
    mine.mkdir()
    way = "pp" if kind == "stages" else "tp"
    ranks = {f"{way}_size": 2, f"{way}_rank": int(rank), f"{way}_group": torch.distributed.group.WORLD}
    engine = MiniSGLang(address, mine, "mha" if kind == "stages" else kind, ranks=ranks)
    try:
        told = scenario(engine, int(rank), int(first))
    finally:
        engine.close()
    torch.distributed.destroy_process_group()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
