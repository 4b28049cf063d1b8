"""How fast the native module moves bytes, beside the ceilings of the same device in the same run.

    python measure.py [--kind cuda] [--device 0] [--rounds 5] [--scale 1] [--json FILE]

Ceilings: one long copy between page-locked memory and the device, each way, and one on the device. Goals: copies of
2 MiB and more at 90 % of the first, kernels at 80 % of the second, and 50 microseconds of the host for the store of
one chunk of 32 layers. Every transfer that is timed is also looked at: wrong bytes end the run.
"""

from __future__ import annotations

import argparse
import array
import random
import sys
from dataclasses import dataclass

from rig import MIB, Rig, Row, report, rig

from lmcache.v1.kv_layout import kv_format
from lmcache.v1.kv_layout.shape_desc import PageBufferShapeDesc
from lmcache.v1.platform.transfer_plan import BatchStep, KernelGroupSpec, LaunchVar, StagingCopy

H2D, D2H = 0, 1
CHUNKS_KIB = (256, 1024, 2048, 8192, 32768)
PINNED_GOAL, KERNEL_GOAL, LAUNCH_MICROSECONDS = 0.9, 0.8, 50.0
ALIGNMENT = 64 * MIB  # pinned memory comes in pieces of this size


@dataclass(frozen=True)
class Case:
    """Pages of one layout as an engine has them: 32 layers of one tensor each, bfloat16."""

    row: int
    heads: int
    width: int
    layers: int = 32
    block_size: int = 16

    @property
    def page(self) -> int:
        """Bytes of one layer of one block."""
        row = kv_format(self.row)
        return row.page_bytes(self.block_size, self.heads, self.width, 2)


CASES = (
    Case(13, heads=8, width=256),  # vLLM, K and V side by side
    Case(12, heads=8, width=256),  # the same, heads outside
    Case(2, heads=8, width=128),  # K and V planes of a page
    Case(1, heads=8, width=128),  # K and V apart: two pieces a page
    Case(3, heads=1, width=576),  # MLA
)


def ceilings(one: Rig, nbytes: int) -> dict[str, float]:
    """Bytes a second of one long copy: H2D, D2H, and on the device."""
    host, here, there = one.on_host(nbytes), one.on_device(nbytes), one.on_device(nbytes)
    pairs = {"pinned H2D": (here, host), "pinned D2H": (host, here), "device copy": (there, here)}
    found = {
        name: nbytes / one.seconds(lambda dst=dst, src=src: one.copy(dst, src, nbytes))
        for name, (dst, src) in pairs.items()
    }
    one.free()
    return found


def chunk_copies(one: Rig, nbytes: int, most: dict[str, float]) -> list[Row]:
    """The same bytes in chunks: copies cut at pieces of pinned memory, and batches."""
    host, here, rows = one.on_host(nbytes), one.on_device(nbytes), []
    for kib in CHUNKS_KIB:
        size = kib << 10
        offsets = range(0, nbytes - size + 1, size)
        for way, name in ((H2D, "pinned H2D"), (D2H, "pinned D2H")):
            dst, src = (here, host) if way == H2D else (host, here)

            def split(
                dst: int = dst, src: int = src, way: int = way, size: int = size, at: range = offsets
            ) -> None:
                for offset in at:
                    one.native.memcpy_split_async(
                        dst + offset, src + offset, size, offset, ALIGNMENT, way, one.stream, one.device
                    )

            def batch(dst: int = dst, src: int = src, size: int = size, at: range = offsets) -> None:
                table = [array.array("q", [base + offset for offset in at]) for base in (dst, src)]
                sizes = array.array("q", [size] * len(at))
                one.native.memcpy_batch_async(*table, sizes, one.stream, one.device)

            for what, work in (("copies", split), ("one batch", batch)):
                rate = len(offsets) * size / one.seconds(work)
                goal = PINNED_GOAL if kib >= 2048 else None
                told = f"{name.split()[1]} in chunks of {kib} KiB, {what}"
                rows.append(Row(told, rate / 1e9, "GB/s", name, rate / most[name], goal))
    one.free()
    return rows


class Pages:
    """One case on the device: its pages, and objects of `per_object` blocks each."""

    def __init__(self, one: Rig, case: Case, blocks: int, per_object: int) -> None:
        row = kv_format(case.row)
        self.one, self.case, self.blocks, self.per_object = one, case, blocks, per_object
        # Twice as many pages as are moved, so that random ids leave gaps.
        self.count = 2 * blocks
        self.pages = [one.on_device(self.count * case.page) for _ in range(case.layers)]
        self.object_bytes = per_object * case.page * case.layers
        self.objects = [one.on_device(self.object_bytes) for _ in range(blocks // per_object)]
        self.ids = random.Random(1).sample(range(self.count), blocks)
        self.shape = PageBufferShapeDesc(
            row.kv_size, case.layers, self.count, case.block_size, case.heads, case.width, 2, 0
        )
        self.numbers = [
            getattr(self.shape, name)
            for name in ("kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems")
        ]

    def move(self, way: int) -> None:
        """Queue the transfer of all blocks."""
        self.one.native.block_transfer(
            self.case.row, self.numbers, way, self.one.device, self.one.stream, self.pages, self.objects,
            self.ids, self.per_object * self.case.block_size,
        )  # fmt: skip

    def check(self) -> None:
        """Pages of known bytes to objects, then to other pages, and back to what they were.

        Which byte of an object is which the kit's tests say; here it is enough that none is lost and none is new.
        """
        one, nbytes = self.one, self.count * self.case.page
        kept = []
        for number, pages in enumerate(self.pages):
            one.write(pages, random.Random(number).randbytes(nbytes))
            kept.append(one.read(pages, nbytes))
        self.move(D2H)
        for pages in self.pages:
            one.native.memset_async(pages, 0, nbytes, one.stream, one.device)
        self.move(H2D)
        taken = set(self.ids)
        for pages, was in zip(self.pages, kept, strict=True):
            now = one.read(pages, nbytes)
            for piece, block in self._pieces():
                want = was[piece] if block in taken else bytes(piece.stop - piece.start)
                if now[piece] != want:
                    raise SystemExit(
                        f"format {self.case.row}, block {block}: the bytes are not what was stored"
                    )

    def _pieces(self) -> list[tuple[slice, int]]:
        """Where each block's bytes lie in a layer's tensor."""
        planes = 2 if kv_format(self.case.row).is_two_major else 1
        size = self.case.page // planes
        return [
            (slice((plane * self.count + block) * size, (plane * self.count + block + 1) * size), block)
            for plane in range(planes)
            for block in range(self.count)
        ]


def kernels(one: Rig, blocks: int, ceiling: float) -> list[Row]:
    """Gather and scatter of random blocks, in objects of 16 blocks."""
    rows = []
    for case in CASES:
        small = Pages(one, case, 8, 4)
        small.check()
        one.free()
        pages = Pages(one, case, blocks, 16)
        nbytes = len(pages.objects) * pages.object_bytes
        for way, name in ((D2H, "gather"), (H2D, "scatter")):
            rate = nbytes / one.seconds(lambda way=way, pages=pages: pages.move(way))
            told = f"{name} of random blocks, {kv_format(case.row).name}"
            rows.append(Row(told, rate / 1e9, "GB/s", "device copy", rate / ceiling, KERNEL_GOAL))
        one.free()
    return rows


def launches(one: Rig) -> list[Row]:
    """What the host spends on the store of one chunk of 32 layers: by one launch, and by a plan with its copy."""
    case, per_object = CASES[0], 16
    pages = Pages(one, case, per_object, per_object)
    staging, host = pages.objects[0], one.on_host(pages.object_bytes)
    table, ids = one.on_device(8 * case.layers), one.on_device(8 * per_object)
    one.write(table, array.array("q", pages.pages).tobytes())
    one.write(ids, array.array("q", pages.ids).tobytes())
    group = KernelGroupSpec(
        table, [staging], pages.shape, per_object * case.block_size, case.row, ids, per_object
    )
    step = BatchStep([StagingCopy(host, staging, pages.object_bytes, 0)], [LaunchVar(0, 0, per_object, 1, 0)])

    def plan() -> None:
        one.native.execute_object_group_transfer(
            D2H, one.device, one.stream, ALIGNMENT, [group], [step], False, ""
        )

    works = {"one launch": lambda: pages.move(D2H), "a plan of one launch and one copy": plan}
    rows = [
        Row(f"host time of a store of 32 layers, {name}", one.host_seconds(work) * 1e6, "us", most=LAUNCH_MICROSECONDS)
        for name, work in works.items()
    ]  # fmt: skip
    one.free()
    return rows


def main(arguments: list[str]) -> int:
    """Exit code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=("cuda", "rocm"), default="cuda", help="which driver (cuda)")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the device (0)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of which the best counts (5)")
    parser.add_argument("--scale", type=float, default=1.0, help="how much is moved; 1 is 1 GiB (1)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the rows to this file")
    given = parser.parse_args(arguments)
    nbytes = max(int(given.scale * 1024) * MIB, 32 * MIB)
    with rig(given.kind, given.device, given.rounds) as one:
        info = one.native.device_info(given.device)
        print(
            f"{info['name']}, driver {one.native.driver_version()}, {nbytes // MIB} MiB, best of {given.rounds}"
        )
        most = ceilings(one, nbytes)
        rows = [Row(f"ceiling: {name}", rate / 1e9, "GB/s") for name, rate in most.items()]
        rows += chunk_copies(one, nbytes, most)
        rows += kernels(one, max(1, int(given.scale * 64)) * 16, most["device copy"])
        rows += launches(one)
    return report(rows, given.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
