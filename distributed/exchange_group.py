"""The exchange engine over torch.distributed: Gloo for tensors of a CPU, NCCL (exchange_nccl) for those of GPUs.

Process groups are made by hand for one exchange; torch's default group and its registries are never touched.
They are neither encrypted nor authenticated: they are for links that the user declared trusted.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed

from . import limits
from .addresses import address_facing
from .exchange import Exchange, ExchangeFailed
from .exchange_nccl import Messages, NcclCarrier, can_use_nccl
from .layout import Span

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

# What is used of it has no declared types.
dist: Any = torch.distributed
# Gloo takes 31 bits. There is one exchange per attention of a forward.
_TAGS, _TAGS_PER_FORWARD = 1 << 31, 4096
_STALL = timedelta(seconds=limits.STALL_TIMEOUT)
_Value = TypeVar("_Value")


class _Carrier(Protocol):
    """Moves the messages of one operation."""

    waiting: float

    def start(self, sends: Messages, receives: Messages, tag: int, check: Callable[[], None]) -> Callable[[], None]:
        """Begin to move messages; what is returned ends that."""
        ...

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until everything that was carried is in place."""
        ...

    def abort(self) -> None:
        """End everything that is under way. May be called by any thread, once; nothing can be carried afterwards."""
        ...


def available_backends(device: torch.device) -> tuple[str, ...]:
    """Backends that can exchange tensors of `device` here, the best first. All ranks need the same one."""
    # With NCCL, Gloo carries what the ranks have to agree on, so that no one waits for a GPU.
    if not dist.is_available() or not dist.is_gloo_available():
        return ()
    if device.type == "cuda":
        return ("nccl",) if can_use_nccl() else ()
    return ("gloo",) if device.type == "cpu" else ()


def host_store(host: str) -> TCPStore:
    """Where the ranks find each other: at `host`, on the free port `.port`, until the last reference is dropped.

    It is needed until every rank has joined. Raises OSError if `host` is no address of this machine.
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    # Left to itself, the store listens on every interface.
    with socket.create_server(address[:2], family=family) as listening:
        port = listening.getsockname()[1]
        listening_fd = listening.detach()
    # With libuv, older versions of torch take no socket.
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening_fd, use_libuv=False
    )


def join_group(
    backend: str,
    rank: int,
    size: int,
    host: str,
    port: int,
    secret: bytes,
    device: torch.device,
    check: Callable[[], None],
) -> GroupExchange:
    """Become `rank` of `size` in the group that meets under `secret` at the store at host:port.

    All ranks, the one that hosts the store too, call this at about the same time, and then listen on ports of the
    interface that faces the store. Raises ExchangeFailed if they don't find each other within GROUP_JOIN_TIMEOUT,
    and what `check` raises.
    """
    helper = _Helper()

    def join() -> list[_Carrier]:
        timeout = timedelta(seconds=limits.GROUP_JOIN_TIMEOUT)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        store = dist.PrefixStore(secret.hex(), store)
        carriers: list[_Carrier] = [_GlooCarrier(store, rank, size, address_facing(host), timeout, helper)]
        if backend == "nccl":
            carriers.append(NcclCarrier(store, rank, size, device))
        return carriers

    try:
        carriers = helper.call(join, check, limits.GROUP_JOIN_TIMEOUT)
    # AttributeError, TypeError: process groups made by hand are no stable interface of torch.
    except (RuntimeError, OSError, AttributeError, TypeError) as error:
        helper.close()
        raise ExchangeFailed(
            f"the machines did not find each other for the exchange of tokens over {backend} ({_first_line(error)}); "
            "a firewall between them has to let them connect to each other on any port"
        ) from error
    except BaseException:
        helper.close()
        raise
    return GroupExchange(rank, size, carriers, helper.close)


class GroupExchange(Exchange):
    """An exchange over process groups. One that failed, or whose wait `check` has ended, is closed and stays so.

    Between begin and the end of gather, nothing else may wait for the GPU: only these waits look at `check`. With NCCL
    `waiting` is that of the GPU's stream, as far as it is known without waiting for it.
    """

    def __init__(self, rank: int, size: int, carriers: Sequence[_Carrier], closed: Callable[[], None]) -> None:
        """carriers: for tensors of the CPU, then for others, if there is one. closed: called at the end of close."""
        super().__init__(rank, size)
        self._carriers = carriers
        self._closed = closed
        self._is_open = True
        self._forward = 0
        self._operation = 0

    def begin(self, forward: int) -> None:
        """See Exchange. Raises ExchangeFailed if the group is closed."""
        self._forward, self._operation = forward, 0
        self._require_open()

    def settle(self) -> None:
        with self._closed_on_failure():
            for carrier in self._carriers:
                carrier.finish(self.check)
        self._require_open()
        self.waiting = sum(carrier.waiting for carrier in self._carriers)

    def close(self) -> None:
        """End what is under way, on the GPU too, and leave the group. Any thread may call this, more than once."""
        if not self._is_open:
            return
        self._is_open = False
        aborting = threading.Thread(target=self._abort, name="monarch-exchange-close", daemon=True)
        aborting.start()
        aborting.join(limits.GROUP_CLOSE_TIMEOUT)

    def _abort(self) -> None:
        for carrier in self._carriers:
            with contextlib.suppress(RuntimeError):
                carrier.abort()
        self._closed()

    def _require_open(self) -> None:
        if not self._is_open:
            raise ExchangeFailed("the machines have left the process group of the token split; they have to join again")

    def _start(
        self, buffers: Sequence[torch.Tensor], regions: Sequence[Sequence[Span]], to: list[int], of: list[int]
    ) -> Callable[[], None]:
        self._require_open()
        self._operation += 1
        carrier = self._carriers[0 if buffers[0].device.type == "cpu" else -1]
        own = _pieces(buffers, regions[self.rank]) if to else []
        sends = [(rank, piece) for rank in to for piece in own]
        receives = [(rank, piece) for rank in of for piece in _pieces(buffers, regions[rank])]
        # A late message of another forward cannot be taken for one of this.
        tag = (self._forward * _TAGS_PER_FORWARD + self._operation) % _TAGS
        with self._closed_on_failure():
            end = carrier.start(sends, receives, tag, self.check)

        def finish() -> None:
            with self._closed_on_failure():
                end()
            self._require_open()
            self.waiting = sum(carrier.waiting for carrier in self._carriers)
            self.sent_bytes += sum(piece.numel() for _, piece in sends)
            self.received_bytes += sum(piece.numel() for _, piece in receives)

        return finish

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.close()
            raise ExchangeFailed(f"the exchange of tokens broke off ({_first_line(error)})") from error
        except BaseException:
            self.close()
            raise


def _pieces(buffers: Sequence[torch.Tensor], spans: Sequence[Span]) -> list[torch.Tensor]:
    """The bytes of these spans in place, without what is empty."""
    parts = (buffer[start:stop] for buffer in buffers for start, stop in spans)
    return [part.view(torch.uint8).reshape(-1) for part in parts if part.numel()]


def _first_line(error: BaseException) -> str:
    """Its first sentence, without the place in somebody's source that Gloo puts in front."""
    text = str(error).partition("\n")[0].rpartition("cc:")[2].partition("] ")
    return (text[2] or text[0]).partition(". ")[0] or type(error).__name__


class _GlooCarrier:
    def __init__(self, store: Store, rank: int, size: int, address: str, timeout: timedelta, helper: _Helper) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
        self._peer = 1 if rank == 0 else 0
        self._helper = helper
        self.waiting = 0.0

    def start(self, sends: Messages, receives: Messages, tag: int, check: Callable[[], None]) -> Callable[[], None]:
        # The works own what is under way: dropping one takes its message back.
        works = [self._group.recv([piece], rank, tag) for rank, piece in receives]
        works += [self._group.send([piece], rank, tag) for rank, piece in sends]

        def wait() -> None:
            for work in works:
                work.wait(_STALL)

        def end() -> None:
            began = time.perf_counter()
            if works:
                self._helper.call(wait, check)
            self.waiting += time.perf_counter() - began

        return end

    def finish(self, check: Callable[[], None]) -> None:
        pass

    def abort(self) -> None:
        # A wait that runs out makes Gloo close its connections, which ends every other wait, on all versions of torch.
        work = self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _TAGS - 1)
        work.wait(timedelta(milliseconds=1))


class _Helper:
    """A thread that makes the calls that cannot be cancelled, while their caller looks at `check`."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="monarch-exchange", daemon=True).start()

    def call(self, function: Callable[[], _Value], check: Callable[[], None], seconds: float | None = None) -> _Value:
        """What `function` returns or raises. Raises TimeoutError after `seconds`, and what `check` raises.

        A call that was given up goes on, and the helper is of no more use.
        """
        answer: SimpleQueue[tuple[_Value | None, BaseException | None]] = SimpleQueue()

        def call() -> None:
            try:
                answer.put((function(), None))
            except BaseException as error:
                answer.put((None, error))

        self._calls.put(call)
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                value, error = answer.get(timeout=limits.POLL_SECONDS)
                break
            except Empty:
                check()
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"no answer for {seconds:.0f} s") from None
        if error is not None:
            raise error
        return value  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Let the thread end once its call is over."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
