"""What the ranks of a forward by tokens give each other: keys and values before attentions, hidden states at the end.

Lays them out in memory that is used over and over; how they get to the others is the exchange's business.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .compressed import Packing
from .exchange import DISAGREEMENT, Exchange, ExchangeFailed
from .families import Streams
from .layout import Layout, Span


class Swap:
    """The exchanges of one forward on one rank."""

    def __init__(
        self,
        exchange: Exchange,
        layout: Layout,
        buffers: dict[Any, torch.Tensor],
        agreed: str | None,
        *,
        overlap: bool,
        compress: bool,
    ) -> None:
        """buffers: memory of earlier forwards; see TokenSplit.run for the rest."""
        self._exchange = exchange
        self._layout = layout
        self._buffers = buffers
        self._expected = agreed
        self.overlap = overlap and exchange.size > 1
        self._compress = compress
        # (length, this rank's sections, all ranks' regions) of sequences that were gathered.
        self._plans: dict[Streams, tuple[int, list[Span], list[list[Span]]]] = {}
        # The same for what is put together with this rank's own tokens at the front: (length, all ranks' regions).
        self._own_first: dict[Streams, tuple[int, list[list[Span]]]] = {}
        # Digest of the streams, shares and sizes; None before the first exchange.
        self.plan: str | None = None
        self._turn = 0

    def gather(self, buffer: torch.Tensor, wanted: Sequence[str], hidden: torch.Tensor) -> None:
        """Fill in buffer [all tokens of the streams that are wanted, …], which has this rank's, on rank 0.

        hidden: the state that it was taken from.
        """
        self._agree(hidden)
        if not self._layout.whole.issuperset(wanted):
            self._exchange.gather([buffer], self._layout.regions(wanted))

    def all_gather(self, own: list[torch.Tensor], streams: Streams, size: int) -> list[torch.Tensor]:
        """Token-major tensors [own tokens, …] -> [all tokens, …], in memory that the next call but one uses again.

        own: keys, values and, if it is to be put together as well, the mask. size: of a head.
        """
        plan = self._plans.get(streams)
        if plan is None:
            layout = self._layout
            plan = layout.full_length(streams), layout.sections(streams), layout.regions(streams)
            self._plans[streams] = plan
        length, sections, regions = plan
        kv, rest = (own[:2], own[2:]) if self._compress else ([], own)
        if self._exchange.size > 1:
            self._turn = 1 - self._turn
            self._agree(own[0])
        gathered = []
        if kv:
            _, gathered = self._side_by_side("kv", kv, length, sections)
            self._start_compressed(gathered[0], gathered[1], regions, size)()
        if rest:
            buffers, full = self._side_by_side("rest", rest, length, sections)
            self._exchange.all_gather(buffers, regions)
            gathered = [*gathered, *full]
        return gathered

    def start_own_first(
        self, k: torch.Tensor, v: torch.Tensor, streams: Streams
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Begin to swap keys and values [B, H, own tokens, D]; what is returned ends it and gives those of the others.

        Of streams that are cut, in any order.
        """
        if streams not in self._own_first:
            self._own_first[streams] = self._layout.own_first(streams)
        length, regions = self._own_first[streams]
        self._turn = 1 - self._turn
        batch, heads, _, size = k.shape
        # [rank after rank, 2, B, H, D], this rank's own at the front.
        buffer = self._buffer("kv", length, 2 * batch * heads * size, k.dtype, k.device)
        buffer = buffer.view(length, 2, batch, heads, size)
        _, own = regions[self._exchange.rank][0]
        for position, tensor in enumerate((k, v)):
            buffer[:own, position] = _pick(tensor.movedim(2, 0), self._layout, streams)
        self._agree(buffer)
        if self._compress:
            end = self._start_compressed(buffer[:, 0], buffer[:, 1], regions, size)
        else:
            end = self._exchange.start([buffer.flatten(1)], regions)

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            end()
            others = buffer[own:].movedim(0, 3)
            return others[0], others[1]

        return finish

    def _side_by_side(
        self, name: str, own: list[torch.Tensor], length: int, sections: list[Span]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(buffers, tensors [all tokens, …] in them) that hold this rank's own tokens already.

        One buffer for each dtype: what a rank has of a stream is one piece of memory.
        """
        if self._exchange.size == 1:
            return own, own
        widths = [math.prod(tensor.shape[1:]) for tensor in own]
        buffers: dict[torch.dtype, torch.Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in own):
            width = sum(width for tensor, width in zip(own, widths, strict=True) if tensor.dtype is dtype)
            buffers[dtype] = self._buffer(name, length, width, dtype, own[0].device)
        tensors, used = [], dict.fromkeys(buffers, 0)
        for tensor, width in zip(own, widths, strict=True):
            begin = used[tensor.dtype]
            used[tensor.dtype] += width
            full = buffers[tensor.dtype][:, begin : begin + width].unflatten(1, tensor.shape[1:])
            offset = 0
            for start, stop in sections:
                full[start:stop] = tensor[offset : offset + stop - start]
                offset += stop - start
            tensors.append(full)
        return list(buffers.values()), tensors

    def _start_compressed(
        self, k: torch.Tensor, v: torch.Tensor, regions: list[list[Span]], size: int
    ) -> Callable[[], None]:
        """Begin to swap keys and values [all tokens, …]; what is returned ends it. This rank's own stay as they are."""
        packing = Packing.of(k, v, size)
        packed = self._buffer("packed", k.shape[0], packing.width, torch.uint8, k.device)
        others = [span for rank, spans in enumerate(regions) if rank != self._exchange.rank for span in spans]
        if others:
            for start, stop in regions[self._exchange.rank]:
                packing.pack(k[start:stop], v[start:stop], packed[start:stop])
        end = self._exchange.start([packed], regions)

        def finish() -> None:
            end()
            for start, stop in others:
                packing.unpack(packed[start:stop], k[start:stop], v[start:stop])

        return finish

    def _buffer(self, name: str, length: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (self._turn, name, dtype, device)
        held = self._buffers.get(key)
        if held is None or held.numel() < length * width:
            held = self._buffers[key] = torch.empty(length * width, dtype=dtype, device=device)
        return held[: length * width].view(length, width)

    def _agree(self, first: torch.Tensor) -> None:
        """Before the first exchange of a forward: all ranks have the same streams, shares and sizes."""
        if self.plan is not None:
            return
        layout = self._layout
        described = repr(
            (layout.lengths, layout.spans, tuple(first.shape[1:]), first.dtype, self.overlap, self._compress)
        )
        self.plan = hashlib.blake2b(described.encode(), digest_size=20).hexdigest()
        if self._expected is None:
            self._exchange.agree(self.plan)
        elif self._expected != self.plan:
            raise ExchangeFailed(DISAGREEMENT)


def _pick(own: torch.Tensor, layout: Layout, streams: Streams) -> torch.Tensor:
    """This rank's tokens [own tokens of streams, …] -> only those of the streams that are cut."""
    if layout.whole.isdisjoint(streams):
        return own
    parts = own.split([layout.own_length((stream,)) for stream in streams])
    return torch.cat([part for stream, part in zip(streams, parts, strict=True) if stream not in layout.whole])
