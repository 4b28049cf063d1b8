"""What a client's hold on a server's pool promises when it is closed."""

from __future__ import annotations

import os
import re
import threading
import weakref

import pytest

from helpers.local import pool_view
from lmcache.v1.multiprocess.attachment import Attachment
from lmcache.v1.storage.shm_pool import PAGE, PoolView

PATIENT = 20.0
KERNEL = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


def test_a_closed_attachment_lets_go_of_the_pool_at_once_though_its_page_tables_are_being_filled() -> None:
    started = threading.Event()

    class Large(PoolView):
        """Whose page tables are never all filled."""

        def prefault(self, stop: threading.Event) -> None:
            started.set()
            assert stop.wait(PATIENT)

    pool = pool_view(16, Large)
    gone = weakref.ref(pool)
    attachment = Attachment(None, pool, "")
    del pool
    attachment.prefault()
    assert started.wait(PATIENT)
    assert gone() is not None
    attachment.close()
    assert gone() is None


@pytest.mark.skipif(KERNEL < (5, 14), reason="Linux fills page tables at a word from 5.14 on")
def test_page_tables_are_filled_no_further_once_somebody_wants_that_to_stop() -> None:
    def filled(stop: threading.Event) -> bool:
        view = pool_view(16)
        view.prefault(stop)
        with open("/proc/self/smaps") as maps:
            start = view.address - PAGE
            lines = iter(maps)
            assert any(line.startswith(f"{start:x}-") for line in lines), "the mapping"
            size = next(line for line in lines if line.startswith("Rss:"))
        return int(size.split()[1]) << 10 == 17 * PAGE

    stop = threading.Event()
    assert filled(stop)
    stop.set()
    assert not filled(stop)
