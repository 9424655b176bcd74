"""What a worker computes for the driver that it serves: its model, its forwards, and its part in token splits.

Messages come in the serving thread and become jobs, which run in the compute thread and answer for themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import limits
from .auth import ExchangeKeys, KeyPair
from .codec import ProtocolError, replace_kept
from .files import FileRef
from .jobs import Job, Jobs, Stopped, say
from .messages import Kind, Message
from .runtime import Replica, Runtime
from .usage import Usage
from .worker_tokens import TokenRank


class Computing:
    """One driver's model and forwards."""

    def __init__(
        self, session: bytes, runtime: Runtime, jobs: Jobs, tokens: TokenRank, usage: Usage, *, local: bool
    ) -> None:
        """local: the driver is on this machine."""
        self._session = session
        self._runtime = runtime
        self._jobs = jobs
        self._tokens = tokens
        self._usage = usage
        self._local = local
        # Joins and forwards by tokens up to this number are given up.
        self._abandoned = 0
        # What follows is owned by the compute thread.
        self._replica: Replica | None = None
        self._kept: dict[int | str, torch.Tensor] = {}
        self.shares = 0
        self.seconds = 0.0

    def build(self, number: int, tree: dict[str, Any], file: FileRef, path: Path, digest: str) -> None:
        """Load the model that a recipe with this digest describes; `number` is what that answers."""
        began = time.perf_counter()

        def built() -> dict[str, Any]:
            self._replica = self._runtime.build(tree, path, digest)
            seconds, patched = time.perf_counter() - began, self._replica.patched
            self._usage.add_load(seconds)
            say(f"{file.name} is ready after {seconds:.1f} s, {patched} weights patched.")
            return {"digest": digest, "patched": patched}

        self._jobs.add(Job(self._session, number, Kind.READY, built))

    def forward(self, message: Message) -> None:
        def compute() -> dict[str, Any]:
            if self._replica is None:
                raise ProtocolError("the driver asked for a forward before a model was ready")
            for name in message.body["drop"]:
                self._kept.pop(name, None)
            self._kept.update({name: kept.to(self._replica.device) for name, kept in message.body["keep"].items()})
            if sum(tensor.nbytes for tensor in self._kept.values()) > 2 * limits.RUN_TENSOR_CACHE_BYTES:
                raise ProtocolError("the driver keeps more tensors here than is allowed")
            # Copies: a forward may write into its arguments.
            args = replace_kept(message.body["args"], self._kept, copy=True)
            kwargs = replace_kept(message.body["kwargs"], self._kept, copy=True)
            began = time.perf_counter()
            if "tokens" in message.body:
                return self._by_tokens(self._replica, args, kwargs, message.body["tokens"], began)
            output = self._replica.forward(args, kwargs)
            output = output.to("cpu") if isinstance(output, torch.Tensor) else [part.to("cpu") for part in output]
            return {"output": output, "seconds": self._count(time.perf_counter() - began)}

        self._jobs.add(Job(self._session, message.number, Kind.RESULT, compute, message.nbytes))

    def _by_tokens(
        self, replica: Replica, args: list[Any], kwargs: dict[str, Any], plan: Any, began: float
    ) -> dict[str, Any]:
        """Compute this worker's tokens, which go to the other ranks and not into the answer."""
        waited: list[float] = []
        check = self.wanted(int(plan["number"]))
        replica.forward(args, kwargs, lambda model, a, k: waited.append(self._tokens.forward(model, a, k, plan, check)))
        return {"seconds": self._count(time.perf_counter() - began - sum(waited))}

    def _count(self, seconds: float) -> float:
        self.shares += 1
        self.seconds += seconds
        return seconds

    # --- token splits -------------------------------------------------------------------------------------------------

    def exchange_open(self, message: Message) -> None:
        store = message.body["store"]
        keys = ExchangeKeys(KeyPair.of_secret(message.body["secret"].encode()), message.body["encrypted"])

        def opened() -> dict[str, Any]:
            return self._tokens.open(self._replica, store=store, keys=keys)

        self._jobs.add(Job(self._session, message.number, Kind.EXCHANGE, opened))

    def exchange_join(self, message: Message) -> None:
        def joined() -> dict[str, Any]:
            check = self.wanted(message.body["number"])
            return self._tokens.join(message.body, self._replica, check, local=self._local)

        self._jobs.add(Job(self._session, message.number, Kind.EXCHANGE, joined))

    def abandon(self, message: Message) -> None:
        self._abandoned = max(self._abandoned, message.body["number"])

    def wanted(self, number: int) -> Callable[[], None]:
        """A check that raises Stopped once the driver does not want join or forward `number` any more."""

        def check() -> None:
            if self._jobs.cancelled(self._session) or number <= self._abandoned:
                raise Stopped("the driver gave this up")

        return check
