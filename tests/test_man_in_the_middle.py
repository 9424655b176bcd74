"""Whoever listens between the machines sees neither a latent nor a prompt, by rows and by tokens."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monarch_split.demo.reference import ReferenceDiT
from monarch_split.demo.reference_runtime import ReferenceRuntime
from monarch_split.distributed import limits, peers
from monarch_split.distributed.auth import KnownWorker, own_identity
from monarch_split.distributed.exchange_lanes import LaneExchange
from monarch_split.distributed.file_cache import FileCache
from monarch_split.distributed.peer import Peer
from monarch_split.distributed.recipe import Recipe
from monarch_split.distributed.split_tokens import TokenRun
from monarch_split.distributed.worker import Worker
from monarch_split.tests.driving import SAME, equal_shares, forget, open_session
from monarch_split.tests.network_proxy import network_to, port_with_a_neighbour

# A run of 16 bytes of a tensor holds one of these whole, wherever it begins.
_WORD = 8
_STEPS = 3


@contextlib.contextmanager
def serving(cache: Path, *, encrypted: bool) -> Iterator[int]:
    """A worker in a thread of this process. Gives its port."""
    own = own_identity() if encrypted else None
    port = port_with_a_neighbour()
    worker = Worker(ReferenceRuntime(), FileCache(cache), ["127.0.0.1"], port, "w", own=own)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield port
    finally:
        worker.stop()
        thread.join(20)
        assert not thread.is_alive()


def words_of(tensor: torch.Tensor, captured: bytearray) -> int:
    """How many of the aligned words of `tensor` occur anywhere in what was captured."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    words = np.unique(data[: data.size // _WORD * _WORD].view(np.uint64))
    found: set[int] = set()
    for at in range(_WORD):
        heard = np.frombuffer(captured, np.uint64, (len(captured) - at) // _WORD, at)
        found.update(heard[words[np.searchsorted(words, heard).clip(max=words.size - 1)] == heard].tolist())
    return len(found)


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the ranks of this process have sent each other: keys, values and hidden states."""
    sent: list[torch.Tensor] = []
    stock = LaneExchange._start

    def start(exchange: LaneExchange, buffers: Any, regions: Any, to: list[int], of: list[int]) -> Any:
        own = [buffer[begin:end] for buffer in buffers for begin, end in regions[exchange.rank]] if to else []
        sent.extend(part.clone() for part in own if part.is_floating_point())
        return stock(exchange, buffers, regions, to, of)

    monkeypatch.setattr(LaneExchange, "_start", start)
    return sent


@pytest.mark.timeout(60)
@pytest.mark.parametrize("encrypted", [True, False], ids=["with keys", "in the clear"])
@pytest.mark.parametrize("mode", ["rows", "tokens"])
def test_nobody_between_the_machines_sees_a_latent_or_a_prompt(
    mode: str,
    encrypted: bool,
    recipe: Recipe,
    model: ReferenceDiT,
    tmp_path: Path,
    exchanged: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(monkeypatch)
    equal_shares(monkeypatch)
    monkeypatch.setattr(limits, "EXCHANGE_PROBE_BYTES", 16 * 1024)
    # A cluster on the loopback counts as private; this one is to be treated like any other.
    monkeypatch.setattr(TokenRun, "_private", not encrypted)
    if not encrypted:
        monkeypatch.setattr(peers, "Peer", functools.partial(Peer, worker_at=lambda _: KnownWorker(None)))
    rows = 2 if mode == "rows" else 1
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randn(rows, 300, 32, generator=generator)
    latents = [torch.randn(rows, 16, 16, 16, generator=generator) for _ in range(_STEPS)]
    outputs: list[torch.Tensor] = []
    t, kwargs = torch.full((rows,), 0.5), {"context": prompt, "transformer_options": {}}
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving(tmp_path, encrypted=encrypted))
        network = stack.enter_context(network_to(port))
        session = stack.enter_context(open_session([network.address], recipe, mode=mode, model=model))
        captured = network.captured = bytearray()
        stack.enter_context(torch.inference_mode())
        outputs += [session.forward(model, (latent.clone(), t), kwargs) for latent in latents]
    assert session.report.forwards_split >= 2, session.report.line()
    for latent, output in zip(latents, outputs, strict=True):
        with torch.inference_mode():
            assert (model(latent, t, context=prompt) - output).abs().max() <= SAME
    # The worker's row, or all of them, travel there; the worker's rows of the result travel back.
    own = slice(1, 2) if mode == "rows" else slice(None)
    seen = {"prompt": words_of(prompt[own], captured), "latent": words_of(latents[-1][own], captured)}
    if mode == "rows":
        seen["result"] = words_of(outputs[-1][own], captured)
    else:
        seen["keys and values"] = words_of(torch.cat([part.flatten() for part in exchanged]), captured)
    if encrypted:
        assert seen == dict.fromkeys(seen, 0)
    else:
        assert all(seen.values()), seen
