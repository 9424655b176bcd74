"""Token split: a rank runs the stock forward but holds only its tokens between the first and the last block.

Hooks on the blocks of one model instance, for the length of one forward, cut what goes in; the attention override swaps
keys and values with the other ranks; a hook on the last block gathers. Where the tokens are is the family's business.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from .exchange import Exchange
from .families import Blocks, Family, Streams
from .layout import Layout, NotSplittable
from .partial_attention import attend, can_attend_in_parts, heads_first, merge
from .swap import Swap

_OVERRIDE = "optimized_attention_override"
_OTHER_ORDER = "its token streams come in another order than is known of its family"


class _Finished(Exception):
    """Ends the forward of a worker once its tokens have been handed in."""


class TokenSplit:
    """The token splits of one run on one rank, with the memory they use over and over."""

    def __init__(self, family: Family, exchange: Exchange) -> None:
        self.exchange = exchange
        self._family = family
        # Digest of the streams, shares and sizes of the last forward.
        self.plan: str | None = None
        self._buffers: dict[Any, torch.Tensor] = {}

    def run(
        self,
        model: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shares: Sequence[float],
        number: int,
        agreed: str | None = None,
        *,
        overlap: bool = False,
        compress: bool = False,
    ) -> Any:
        """Output of `forward(*args, **kwargs)`, which is the forward of `model`, on rank 0; None on the others.

        shares: relative number of tokens per rank; number: of this forward, the same on every rank and rising;
        agreed: the `plan` of an earlier forward that all ranks expect again, which spares them to ask each other;
        overlap: attend to this rank's own tokens while the others' are on their way, where attention allows it;
        compress: keys and values of the others come in fewer bytes, so that the output is an approximation.
        Raises NotSplittable (on every rank alike), ExchangeFailed, and what the forward or the exchange's check raises.
        """
        reason = self._family.refuse(model)
        if reason is not None:
            raise NotSplittable(reason)
        self.exchange.begin(number)
        under_way = _Forward(
            self._family, self.exchange, self._buffers, tuple(shares), agreed, overlap=overlap, compress=compress
        )
        output = under_way.run(model, forward, args, kwargs)
        self.plan = under_way.swap.plan
        return output


class _Forward:
    """One forward that is under way."""

    def __init__(
        self,
        family: Family,
        exchange: Exchange,
        buffers: dict[Any, torch.Tensor],
        shares: tuple[float, ...],
        agreed: str | None,
        *,
        overlap: bool,
        compress: bool,
    ) -> None:
        self._family = family
        self._exchange = exchange
        self._layout = Layout(exchange.rank, shares)
        self.swap = Swap(exchange, self._layout, buffers, agreed, overlap=overlap, compress=compress)
        # The residuals of a ControlNet: those that the stock forward goes through, cut, and the same as they came.
        self._control: dict[str, list[Any]] = {}
        self._full_control: dict[str, list[Any]] = {}
        # Tables are the same object in every block. The original is kept, so that its id stays its own.
        self._cut_tables: dict[tuple[int, str], tuple[Any, Any]] = {}
        # Whose keys the attention that is called now needs from everywhere (see Blocks.attention); () outside of it.
        self._attending: tuple[Streams, ...] = ()
        # What that attention was called with, and the same from everywhere: it may be called again for other queries.
        self._gathered: tuple[list[Any], list[torch.Tensor]] | None = None
        # Sizes of a stream along Blocks.token_dims.
        self._grids: dict[str, torch.Size] = {}

    def run(
        self, model: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        blocks = [(lists, module) for lists in self._family.blocks for module in _modules(model, lists.path)]
        if not blocks:
            raise NotSplittable("the model has no blocks where its family keeps them")
        own = dict(kwargs)
        own["transformer_options"] = {**(kwargs.get("transformer_options") or {}), _OVERRIDE: self._attend}
        if kwargs.get("control"):
            own["control"] = self._own_control(kwargs["control"])
        with self._hooked(model, blocks):
            try:
                return forward(*args, **own)
            except _Finished:
                return None

    def _own_control(self, control: Mapping[str, Any]) -> dict[str, Any]:
        unknown = [name for name, residuals in control.items() if residuals and name not in self._family.control]
        if unknown:
            raise NotSplittable(f"its ControlNet adds to the model's {unknown[0]!r}, which is not known to be tokens")
        self._control = {name: list(residuals) for name, residuals in control.items()}
        self._full_control = {name: list(residuals) for name, residuals in control.items()}
        return dict(self._control)

    @contextmanager
    def _hooked(self, model: torch.nn.Module, blocks: Sequence[tuple[Blocks, torch.nn.Module]]) -> Iterator[None]:
        with ExitStack() as stack:

            def hook(handle: Any) -> None:
                stack.callback(handle.remove)

            end = self._family.gather_before
            if end:
                hook(_submodule(model, end).register_forward_pre_hook(self._gather_argument(blocks[-1][0])))
            for position, (lists, module) in enumerate(blocks):
                enter = self._entering(lists, module)
                leave = self._leaving(lists, last=not end and position == len(blocks) - 1)
                hook(module.register_forward_pre_hook(enter, with_kwargs=True))
                hook(module.register_forward_hook(leave))
                for path, choices in lists.attention.items():
                    if path:
                        attention = _submodule(module, path)
                        hook(attention.register_forward_pre_hook(self._set_attending(choices)))
                        hook(attention.register_forward_hook(self._set_attending(())))
            yield

    def _set_attending(self, choices: tuple[Streams, ...]) -> Callable[..., None]:
        def set_attending(*_: Any) -> None:
            self._attending, self._gathered = choices, None

        return set_attending

    # --- into and out of a block ----------------------------------------------------------------------------------

    def _entering(self, lists: Blocks, module: torch.nn.Module) -> Callable[..., Any]:
        names = lists.positional or _parameter_names(type(module))

        def enter(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            self._exchange.check()
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            changed = self._cut_arguments(lists, named)
            self._attending = lists.attention.get("", ())
            positional = tuple(changed.get(name, value) for name, value in zip(names, args, strict=False))
            return positional, {name: changed.get(name, value) for name, value in kwargs.items()}

        return enter

    def _cut_arguments(self, lists: Blocks, named: Mapping[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name, streams in lists.tokens.items():
            changed[name] = self._own_tokens(lists, named.get(name), streams)
        for name, elements in lists.tuples.items():
            held = named.get(name)
            if not isinstance(held, (tuple, list)) or len(held) != len(elements):
                raise NotSplittable(_OTHER_ORDER)
            parts = zip(held, elements, strict=True)
            changed[name] = tuple(self._own_tokens(lists, hidden, streams) for hidden, streams in parts)
        for name, table in lists.tables.items():
            if named.get(name) is not None:
                cut = lambda value, table=table: self._cut(value, table.streams, table.dim)  # noqa: E731
                changed[name] = self._once(name, named[name], cut)
        for name, adjust in lists.adjust.items():
            if name in named:
                changed[name] = self._once(name, named[name], lambda v, adjust=adjust: adjust(v, self._layout))
        return changed

    def _own_tokens(self, lists: Blocks, hidden: Any, streams: Streams) -> Any:
        """A stream that begins here, cut to this rank's tokens. A copy: blocks write into their arguments."""
        if all(stream in self._layout.spans for stream in streams):
            return hidden
        first, last = lists.token_dims
        if len(streams) != 1 or not isinstance(hidden, torch.Tensor) or hidden.ndim <= last:
            raise NotSplittable(_OTHER_ORDER)
        stream = streams[0]
        self._grids[stream] = hidden.shape[first : last + 1]
        self._layout.add(stream, math.prod(self._grids[stream]), whole=stream in self._family.whole)
        self._cut_control(stream)
        start, stop = self._layout.own(stream)
        own = hidden.flatten(first, last).narrow(first, start, stop - start)
        return own.unflatten(first, (stop - start, *[1] * (last - first))).clone()

    def _cut_control(self, stream: str) -> None:
        """Cut the residuals for a stream in the very lists that the stock forward goes through."""
        first, last = self._layout.own(stream)
        for name, residuals in self._control.items():
            if self._family.control.get(name) == stream:
                for index, residual in enumerate(residuals):
                    if residual is not None:
                        own = residual[:, first:last]
                        residuals[index] = own if own.shape[1] else None

    def _once(self, name: str, value: Any, cut: Callable[[Any], Any]) -> Any:
        held = self._cut_tables.get((id(value), name))
        if held is not None:
            return held[1]
        own = cut(value)
        if own is not value:
            self._cut_tables[id(value), name] = (value, own)
        return own

    def _cut(self, table: Any, streams: Streams, dim: int) -> Any:
        if not isinstance(table, torch.Tensor):
            return table
        if dim < table.ndim and table.shape[dim] in (1, self._layout.own_length(streams)):
            return table
        if dim >= table.ndim or table.shape[dim] != self._layout.full_length(streams):
            raise NotSplittable("what it keeps for every token does not have one entry for each")
        parts = [table.narrow(dim, start, stop - start) for start, stop in self._layout.sections(streams)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _leaving(self, lists: Blocks, *, last: bool) -> Callable[..., Any]:
        def leave(_: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            self._attending, self._gathered = (), None
            return self._gather(lists, output) if last else None

        return leave

    def _gather_argument(self, lists: Blocks) -> Callable[..., Any]:
        def gather(_: torch.nn.Module, args: tuple[Any, ...]) -> Any:
            return (self._gather(replace(lists, returns=(self._family.result,)), args[0]), *args[1:])

        return gather

    def _gather(self, lists: Blocks, output: Any) -> Any:
        elements = [output] if isinstance(output, torch.Tensor) else list(output)
        if len(elements) < len(lists.returns):
            raise NotSplittable(_OTHER_ORDER)
        for index, streams in enumerate(lists.returns):
            wanted = [stream for stream in streams if stream in self._family.result]
            if wanted:
                elements[index] = self._gather_streams(lists, elements[index], streams, wanted)
        if self._exchange.rank != 0:
            raise _Finished
        for name, residuals in self._control.items():
            # The last block's residual is added to its output, which has all tokens now.
            residuals[:] = self._full_control[name]
        return elements[0] if isinstance(output, torch.Tensor) else type(output)(elements)

    def _gather_streams(
        self, lists: Blocks, hidden: torch.Tensor, streams: Streams, wanted: Sequence[str]
    ) -> torch.Tensor:
        """hidden [B, this rank's tokens of streams, C] -> with all tokens of those that are wanted, on rank 0."""
        first, last = lists.token_dims
        own = hidden.flatten(first, last).movedim(first, 0)
        buffer = torch.empty((self._layout.full_length(wanted), *own.shape[1:]), dtype=own.dtype, device=own.device)
        pieces, offset, begin = [], 0, 0
        for stream in streams:
            part = own[offset : offset + self._layout.own_length((stream,))]
            offset += part.shape[0]
            if stream in wanted:
                start, stop = self._layout.own(stream)
                buffer[begin + start : begin + stop] = part
                part = buffer[begin : begin + self._layout.lengths[stream]]
                begin += part.shape[0]
            pieces.append(part)
        self.swap.gather(buffer, wanted, hidden)
        full = buffer if len(wanted) == len(streams) else torch.cat(pieces)
        full = full.movedim(0, first).contiguous()
        return full if first == last else full.unflatten(first, self._grids[streams[0]])

    # --- attention ------------------------------------------------------------------------------------------------

    def _attend(
        self, function: Callable[..., Any], q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._attending:
            return function(q, k, v, heads, *args, **kwargs)
        dim = 2 if kwargs.get("skip_reshape") else 1
        own = k.shape[dim]
        streams = next((streams for streams in self._attending if self._layout.own_length(streams) == own), None)
        if streams is None:
            raise NotSplittable("its attention has other keys than is known of its family")
        if all(stream in self._layout.whole for stream in streams):
            return function(q, k, v, heads, *args, **kwargs)
        if dim == 1 and q.shape[1] == 0:
            # One of several groups of queries, of which this rank has none.
            return torch.empty_like(q)
        mask = args[0] if args else kwargs.get("mask")
        if self.swap.overlap and can_attend_in_parts(q, mask, kwargs):
            return self._attend_in_parts(q, k, v, heads, streams, kwargs)
        parts = [k, v]
        keys_of_mask = mask.shape[-1] if mask is not None else 0
        if mask is not None and keys_of_mask == own:
            # Built from this rank's tokens, so the other ranks have the rest of it.
            parts.append(mask)
        if self._gathered is None or [id(part) for part in parts] != [id(part) for part in self._gathered[0]]:
            tensors = [k.movedim(dim, 0), v.movedim(dim, 0), *(part.movedim(-1, 0) for part in parts[2:])]
            size = q.shape[-1] if dim == 2 or q.ndim == 4 else q.shape[-1] // heads
            self._gathered = parts, self.swap.all_gather(tensors, streams, size)
        gathered = self._gathered[1]
        k, v = (tensor.movedim(0, dim) for tensor in gathered[:2])
        if mask is not None:
            mask = gathered[2].movedim(0, -1) if keys_of_mask == own else self._cut_queries(mask, q.shape[dim], streams)
            args, kwargs = ((mask, *args[1:]), kwargs) if args else (args, {**kwargs, "mask": mask})
        return function(q, k, v, heads, *args, **kwargs)

    def _attend_in_parts(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        streams: Streams,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attention to this rank's own tokens while the others' come in, and then to those."""
        skip_reshape = bool(options.get("skip_reshape"))
        q, k, v = (heads_first(tensor, heads, skip_reshape=skip_reshape) for tensor in (q, k, v))
        end = self.swap.start_own_first(k, v, streams)
        scale = options.get("scale")
        mine = attend(q, k, v, scale)
        output = merge(mine, attend(q, *end(), scale))
        return output if options.get("skip_output_reshape") else output.transpose(1, 2).flatten(2)

    def _cut_queries(self, mask: torch.Tensor, queries: int, streams: Streams) -> torch.Tensor:
        """The rows of a mask [..., queries, keys] for this rank; one row for all stays."""
        if mask.ndim < 2 or mask.shape[-2] in (1, queries):
            return mask
        return self._once(f"mask {streams}", mask, lambda full: self._cut(full, streams, full.ndim - 2))


def _submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        raise NotSplittable(f"{type(module).__name__} has no {path} in this version of ComfyUI") from None


def _modules(model: torch.nn.Module, path: str) -> list[torch.nn.Module]:
    try:
        return list(model.get_submodule(path).children())
    except AttributeError:
        return []


@lru_cache(maxsize=256)
def _parameter_names(block: type[torch.nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(block.forward).parameters)[1:]
