"""Which objects L1 gives up first: the interface of a policy, LRU, and the guard around a plugin's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

__all__ = ["LRU", "EvictionPolicy", "GuardedPolicy"]


class EvictionPolicy(ABC):
    """The order in which published objects go. It knows their keys; memory, pins and leases are L1's.

    Called under the server's lock, on the way of requests: a call is to cost about as much as an operation on
    a dict per key. Keys are opaque bytes.
    """

    @abstractmethod
    def add(self, key: bytes, size: int) -> None:
        """An object of ``size`` bytes was published. Not called for a key that is held."""

    @abstractmethod
    def touch(self, keys: list[bytes]) -> None:
        """Held objects were used just now. The last key is the one to keep longest: a prefix of chunks is of
        use only without gaps."""

    def arrange(self, keys: list[bytes]) -> None:
        """The request of these held objects ended: put them in order, the last to be kept longest. Nobody used
        them just now, but a policy that does not care may take it for that."""
        self.touch(keys)

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """L1 holds the object no more."""

    @abstractmethod
    def victims(self) -> Iterable[bytes]:
        """Held keys, those to go first in front; read only as far as needed, and nothing is called meanwhile.

        L1 passes over what is pinned. What is not named is not evicted.
        """


class LRU(EvictionPolicy):
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes, size: int) -> None:
        self._order[key] = None

    def touch(self, keys: list[bytes]) -> None:
        move = self._order.move_to_end
        for key in keys:
            move(key)

    def remove(self, key: bytes) -> None:
        del self._order[key]

    def victims(self) -> Iterable[bytes]:
        return self._order

    def __len__(self) -> int:
        return len(self._order)


class GuardedPolicy(EvictionPolicy):
    """A policy of a plugin. When it first raises, LRU takes over, which was kept in step for that.

    Args:
        policy: the plugin's.
        on_fault: called once, with the name of the method and what it raised.
    """

    def __init__(self, policy: EvictionPolicy, on_fault: Callable[[str, BaseException], None]) -> None:
        self._policy: EvictionPolicy | None = policy
        self._on_fault = on_fault
        self._spare = LRU()

    def add(self, key: bytes, size: int) -> None:
        self._spare.add(key, size)
        if self._policy is not None:
            self._guard("add", self._policy.add, key, size)

    def touch(self, keys: list[bytes]) -> None:
        self._spare.touch(keys)
        if self._policy is not None:
            self._guard("touch", self._policy.touch, keys)

    def arrange(self, keys: list[bytes]) -> None:
        self._spare.arrange(keys)
        if self._policy is not None:
            self._guard("arrange", self._policy.arrange, keys)

    def remove(self, key: bytes) -> None:
        self._spare.remove(key)
        if self._policy is not None:
            self._guard("remove", self._policy.remove, key)

    def victims(self) -> Iterable[bytes]:
        if self._policy is not None:
            yield from self._named(self._policy)
        if self._policy is None:
            yield from self._spare.victims()

    def _named(self, policy: EvictionPolicy) -> Iterator[bytes]:
        """What the policy names, at most as many keys as there are: an endless answer must not hang us."""
        try:
            for key in islice(policy.victims(), len(self._spare)):
                if not isinstance(key, bytes):
                    raise TypeError(f"{key!r}: expected keys that were added, as bytes")
                yield key
        except KeyboardInterrupt:
            raise
        except GeneratorExit:  # L1 has read enough
            raise
        except BaseException as exc:
            self._fault("victims", exc)

    def _guard(self, name: str, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            self._fault(name, exc)

    def _fault(self, name: str, exc: BaseException) -> None:
        self._policy = None
        self._on_fault(name, exc)
