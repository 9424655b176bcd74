"""What the body of each message from a driver holds, in one table; a message with anything else in it is refused.

What the values mean is checked where they are used.
"""

from __future__ import annotations

import torch

from .codec import ProtocolError
from .messages import Kind, Message

_NONE = type(None)
# By kind: the type of every field, exactly (True is no number here). One that may be None may be left out.
# HELLO has no row: whatever a driver of another version greets with, it has to be told which version this is.
FIELDS: dict[Kind, dict[str, tuple[type, ...]]] = {
    Kind.PAIR: {"name": (str,), "key": (str,)},
    Kind.PREPARE: {"recipe": (dict,), "file": (dict,)},
    Kind.TENSORS: {"for": (int, _NONE), "tensors": (dict,)},
    Kind.FILE_BEGIN: {"file": (dict,)},
    Kind.FILE_CHUNK: {"offset": (int,), "data": (torch.Tensor,)},
    Kind.FILE_END: {"digest": (str,)},
    Kind.FORWARD: {"args": (list,), "kwargs": (dict,), "keep": (dict,), "drop": (list,), "tokens": (dict, _NONE)},
    Kind.EXCHANGE_OPEN: {"store": (bool,), "secret": (str,), "encrypted": (bool,)},
    Kind.EXCHANGE_JOIN: {
        "engine": (str,),
        "rank": (int,),
        "addresses": (list,),
        "secret": (str,),
        "store": (tuple, list, _NONE),
        "number": (int,),
    },
    Kind.ABANDON: {"number": (int,)},
    Kind.CANCEL: {},
    Kind.END: {},
    Kind.FREE: {"files": (list,)},
    Kind.ECHO: {"data": (torch.Tensor,), "bytes": (int,)},
    Kind.SINK: {"secret": (str,)},
}


def check_fields(message: Message) -> None:
    """Raises ProtocolError if a driver's message has a field too many, too few, or of another type."""
    fields = FIELDS.get(message.kind)
    if fields is None:
        return
    for name in message.body:
        if name not in fields:
            raise ProtocolError(f"it has an unknown field {str(name)[:40]!r}")
    for name, types in fields.items():
        if type(message.body.get(name)) not in types:
            raise ProtocolError(f"its field {name!r} is missing or of a wrong type")
