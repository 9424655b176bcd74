"""Messages of a driver that means harm: valid ones, damaged in one or a few places, from a seed. Used by fuzz."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from typing import Any

import torch

from ..distributed import limits
from ..distributed.auth import KeyPair
from ..distributed.codec import DTYPES, Kept, chunk_prefix, encode
from ..distributed.messages import Kind, Message
from ..distributed.recipe import Recipe, tensor_digest
from ..distributed.versions import own_versions

PREFIX = struct.Struct("<4sBBHIQ")

# In place of whatever stood there.
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 1 << 31, 1 << 63, -(1 << 63), 1 << 200, 10**400),
    *(0.0, -0.5, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", ".", "..", "/", "/etc/passwd", "../../../etc/passwd", "..\\..\\x", "a/../../b", "a\0b", "\udc80", "~t"),
    *("C:\\x", "//server/share", "x" * 5000, "\x1b[2J", "diffusion_models", "127.0.0.1", "0.0.0.0", "tcp://*:1"),
    *([], {}, [[]], [None], {"a": 1}, [["127.0.0.1", 1]], {"": 0}),
    *({"~t": 0}, {"~t": 99}, {"~t": -1}, {"~k": "x"}, {"~k": 1}, {"~y": "float32"}, {"~y": "no"}, {"~x": 1}),
    *({"~z": [1 << 47]}, {"~u": []}, {"~d": [[1, 2]]}, {"~d": [[[], 1]]}, {"~d": [[{"~t": 0}, {"~t": 0}]]}),
]
_SIZES = [0, 1, 2, 3, -1, 1 << 20, limits.INLINE_BYTES, limits.INLINE_BYTES + 1, limits.MAX_MESSAGE_BYTES, 1 << 47]


def valid_messages(recipe: Recipe) -> list[tuple[Kind, dict[str, Any]]]:
    """One body or more of every kind that a driver sends; forwards are those of the reference model."""
    up = torch.arange(4096.0).view(64, 64)
    patched = {**recipe.tree, "content": [[1.0, Kept(tensor_digest(up))], (torch.bfloat16, torch.Size([2]), {3: None})]}
    unknown = {**recipe.file.as_dict(), "digest": "0" * 40, "bytes": 3 * limits.INLINE_BYTES, "folder": "checkpoints"}
    x, context = torch.linspace(-1, 1, 16 * 64).view(1, 16, 8, 8), torch.linspace(-1, 1, 16 * 32).view(1, 16, 32)
    options = {"cond_or_uncond": [0], "sigmas": torch.tensor([0.7]), "sample_sigmas": [1.0, 0.5, 0.0]}
    forward = {
        "args": [x, torch.tensor([0.7])],
        "kwargs": {"context": Kept(1), "transformer_options": options},
        "keep": {1: context},
        "drop": [2],
    }
    plan = {"shares": [0.5, 0.5], "number": 1, "agreed": None, "overlap": False, "compress": False}
    join = {
        "engine": "lanes",
        "rank": 1,
        "addresses": [None, ("127.0.0.1", 9)],
        "secret": "00" * 32,
        "store": None,
        "number": 1,
    }
    big = torch.zeros(limits.INLINE_BYTES + 5, dtype=torch.uint8)
    return [
        (Kind.HELLO, {"lanes": 2, **own_versions(None).as_dict()}),
        (Kind.PREPARE, {"recipe": patched, "file": recipe.file.as_dict()}),
        (Kind.PREPARE, {"recipe": recipe.tree, "file": unknown}),
        (Kind.TENSORS, {"for": 1, "tensors": {tensor_digest(up): up}}),
        (Kind.FILE_BEGIN, {"file": unknown}),
        (Kind.FILE_CHUNK, {"offset": 0, "data": torch.zeros(100, dtype=torch.uint8)}),
        (Kind.FILE_CHUNK, {"offset": 0, "data": big}),
        (Kind.FILE_END, {"digest": "0" * 64}),
        (Kind.FORWARD, forward),
        (Kind.FORWARD, {**forward, "tokens": plan}),
        (Kind.EXCHANGE_OPEN, {"store": False, "secret": KeyPair.new().secret.decode(), "encrypted": False}),
        (Kind.EXCHANGE_JOIN, join),
        (Kind.ABANDON, {"number": 3}),
        (Kind.ECHO, {"data": torch.zeros(10, dtype=torch.uint8), "bytes": 1000}),
        (Kind.SINK, {"secret": "00" * 32}),
        (Kind.FREE, {"files": [recipe.file.digest]}),
        (Kind.CANCEL, {}),
        (Kind.END, {}),
        (Kind.PAIR, {"name": "driver", "key": "0" * 40}),
    ]


class Damage:
    """Makes messages and damages them; the same seed makes the same ones."""

    def __init__(self, seed: int, recipe: Recipe) -> None:
        self.chance = random.Random(seed)
        self.messages = valid_messages(recipe)
        self._encoded = [encode(Message(kind, 1, body)) for kind, body in self.messages]
        self._headers = [json.loads(bytes(each.control[0])[PREFIX.size :]) for each in self._encoded]

    # --- frames -----------------------------------------------------------------------------------------------------

    def frames(self, number: int, kinds: frozenset[Kind] | None = None) -> tuple[list[bytes], list[list[bytes]]]:
        """(frames of a control lane, chunks of data lanes) of message `number`, damaged three times out of four.

        kinds: of which it is one before it is damaged; None: any.
        """
        choice = self.chance.choice([i for i, (kind, _) in enumerate(self.messages) if kinds is None or kind in kinds])
        kind, encoded = self.messages[choice][0], self._encoded[choice]
        inline = [bytes(frame) for frame in encoded.control[1:]]
        chunks = [
            [chunk_prefix(number, index, offset), bytes(view[offset : offset + limits.CHUNK_BYTES])]
            for index, view in encoded.chunked
            for offset in range(0, view.nbytes, limits.CHUNK_BYTES)
        ]
        how = self.chance.randrange(4)
        text = bytes(encoded.control[0])[PREFIX.size :]
        if how == 1:
            text = self._damaged_header(choice)
        prefix = PREFIX.pack(b"MNRC", limits.PROTOCOL_VERSION, kind, 0, len(text), number)
        frames = [prefix + text, *inline]
        if how == 2:
            frames = self._damaged_bytes(frames)
        if how == 3:
            frames, chunks = self._damaged_frames(frames, chunks)
        return frames, chunks

    def _damaged_header(self, choice: int) -> bytes:
        header = copy.deepcopy(self._headers[choice])
        for _ in range(self.chance.randint(1, 3)):
            if header["t"] and self.chance.random() < 0.4:
                self._damage_spec(header["t"])
            else:
                header = self.damaged(header)
                if not isinstance(header, dict) or not isinstance(header.get("t"), list):
                    break
        return json.dumps(header).encode()

    def _damage_spec(self, specs: list[Any]) -> None:
        spec = self.chance.choice(specs)
        if not isinstance(spec, list) or len(spec) < 4 or not isinstance(spec[1], list):
            return
        match self.chance.randrange(6):
            case 0:
                spec[0] = self.chance.choice([*DTYPES, "qint8", "", "object"])
            case 1:
                spec[1] = [self.chance.choice(_SIZES) for _ in range(self.chance.randint(0, 18))]
            case 2:
                spec[2] = self.chance.choice(_SIZES)
            case 3:
                spec[3] = 1 - spec[3] if spec[3] in (0, 1) else 0
            case 4:
                specs.append(copy.deepcopy(spec))
            case _:
                specs.remove(spec)

    def _damaged_bytes(self, frames: list[bytes]) -> list[bytes]:
        damaged = [bytearray(frame) for frame in frames]
        for _ in range(self.chance.randint(1, 4)):
            frame = self.chance.choice(damaged)
            at = self.chance.randrange(min(len(frame), 400) + 1)
            match self.chance.randrange(5):
                case 0 if at < len(frame):
                    frame[at] ^= self.chance.randint(1, 255)
                case 1:
                    del frame[at : at + self.chance.randint(1, 20)]
                case 2:
                    frame[at:at] = self.chance.randbytes(8)
                case 3:
                    frame[at:at] = self.chance.choice([b"9", b"[", b"{", b'"', b"\\u0000"]) * self.chance.randint(1, 50)
                case _:
                    del frame[at:]
        if self.chance.random() < 0.6 and len(damaged[0]) >= PREFIX.size:
            # A length that is right lets the damage through to what is behind it.
            struct.pack_into("<I", damaged[0], 8, len(damaged[0]) - PREFIX.size)
        return [bytes(frame) for frame in damaged]

    def _damaged_frames(self, frames: list[bytes], chunks: list[list[bytes]]) -> tuple[list[bytes], list[list[bytes]]]:
        match self.chance.randrange(8):
            case 0:
                frames = frames[:1] + frames[2:]
            case 1:
                frames = [*frames, self.chance.randbytes(self.chance.choice([0, 1, 4096]))]
            case 2:
                frames = [*frames[:1], *reversed(frames[1:])]
            case 3:
                # Number and kind: out of order, of another message, of the other side.
                fields = list(PREFIX.unpack_from(frames[0]))
                fields[self.chance.randrange(6)] = self.chance.choice([0, 1, 2, 200])
                fields[0] = b"MNRC"
                frames = [PREFIX.pack(*fields) + frames[0][PREFIX.size :], *frames[1:]]
            case 4:
                chunks = chunks[1:]
            case 5:
                chunks = [*chunks, *chunks[-1:]]
            case 6:
                number, index, offset = (self.chance.choice([0, 1, 5, 1 << 31, (1 << 32) - 1]) for _ in range(3))
                chunks = [*chunks, [chunk_prefix(number, index, offset), self.chance.randbytes(100)]]
            case _:
                chunks = [[self.chance.randbytes(self.chance.randrange(40))] * self.chance.randint(1, 3)]
        return frames, chunks

    # --- bodies -----------------------------------------------------------------------------------------------------

    def body(self, kinds: frozenset[Kind]) -> tuple[Kind, dict[str, Any]]:
        """A message of one of these kinds that the codec takes, damaged two times out of three."""
        kind, body = self.chance.choice([each for each in self.messages if each[0] in kinds])
        for _ in range(self.chance.randrange(3)):
            body = self.damaged(body)
            body = body if isinstance(body, dict) else {"x": body}
        return kind, body

    def recipe(self) -> tuple[Kind, dict[str, Any]]:
        """A PREPARE that is not damaged, of which something is missing on the worker."""
        return self.chance.choice([each for each in self.messages if each[0] is Kind.PREPARE])

    def damaged(self, value: Any, depth: int = 0) -> Any:
        """`value` with something else in one place of it: another value, one less, one more. Mostly far inside."""
        go_in = depth < 2 or self.chance.random() < 0.8
        if isinstance(value, dict) and value and go_in:
            key = self.chance.choice(list(value))
            match self.chance.randrange(20):
                case 0:
                    return {k: v for k, v in value.items() if k != key}
                case 1:
                    return {**value, self.chance.choice(["", "extra", "for", "~t"]): self._value()}
            return {**value, key: self.damaged(value[key], depth + 1)}
        if isinstance(value, (list, tuple)) and value and go_in:
            items = list(value)
            at = self.chance.randrange(len(items))
            match self.chance.randrange(10):
                case 0:
                    del items[at]
                case 1:
                    items.insert(at, self._value())
                case _:
                    items[at] = self.damaged(items[at], depth + 1)
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, torch.Tensor) and self.chance.random() < 0.8:
            return self._tensor(value)
        # What is of the right type gets further.
        alike = [other for other in _VALUES if type(other) is type(value)]
        return self.chance.choice(alike) if alike and self.chance.random() < 0.6 else self._value()

    def _value(self) -> Any:
        return copy.deepcopy(self.chance.choice(_VALUES))

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        match self.chance.randrange(6):
            case 0:
                return tensor.reshape(-1)
            case 1:
                return tensor.reshape(-1)[: self.chance.randrange(tensor.numel() + 1)]
            case 2:
                return tensor.to(self.chance.choice([torch.float16, torch.bfloat16, torch.int64, torch.bool]))
            case 3:
                return torch.full_like(tensor, self.chance.choice([math.nan, math.inf, -1.0]), dtype=torch.float32)
            case 4:
                return tensor[None].expand(self.chance.choice([1, 3]), *tensor.shape).contiguous()
            case _:
                return torch.zeros([self.chance.randrange(4) for _ in range(self.chance.randrange(6))])
