"""The messages of the protocol, in one table: who sends what, when, and what it carries.

A driver opens one channel per run and worker. The exchange, driver on the left:

    HELLO           ->              versions, names, number of lanes
                    <-  WELCOME     what the worker is, or REFUSED: why it will not serve
    PREPARE         ->              recipe of the MODEL
                    <-  NEED        what is missing: the file (and how much of it is there), patch tensors
    TENSORS         ->              missing patch tensors (several messages)
    FILE_BEGIN      ->              then FILE_CHUNK, as far as FILE_ACK allows, then FILE_END
                    <-  READY       digest of the recipe that was built, or FAILED
    FORWARD         ->              arguments of one forward, cut to this worker's rows
                    <-  RESULT      its output and the seconds it took, or FAILED
    EXCHANGE_OPEN   ->              for a token split
                    <-  EXCHANGE    where this worker listens for the other ranks
    EXCHANGE_JOIN   ->              this worker's rank, everybody's addresses, the secret that opens them
                    <-  EXCHANGE    it is joined, or FAILED
    ABANDON         ->              give up joins and forwards by tokens up to a number; the run goes on
    CANCEL          ->              stop what runs; nothing is answered
    END             ->              the run is over

Answers carry the number of the message that they answer. PROBE only tells whether the driver is still connected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    """Type of a message; the number is what travels."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    PREPARE = 10
    NEED = 11
    TENSORS = 12
    FILE_BEGIN = 13
    FILE_CHUNK = 14
    FILE_ACK = 15
    FILE_END = 16
    READY = 17
    FORWARD = 20
    RESULT = 21
    FAILED = 22
    EXCHANGE_OPEN = 24
    EXCHANGE_JOIN = 25
    EXCHANGE = 26
    ABANDON = 27
    CANCEL = 30
    END = 31
    PROBE = 40


FROM_DRIVER = frozenset(
    {
        Kind.HELLO,
        Kind.PREPARE,
        Kind.TENSORS,
        Kind.FILE_BEGIN,
        Kind.FILE_CHUNK,
        Kind.FILE_END,
        Kind.FORWARD,
        Kind.EXCHANGE_OPEN,
        Kind.EXCHANGE_JOIN,
        Kind.ABANDON,
        Kind.CANCEL,
        Kind.END,
    }
)
FROM_WORKER = frozenset(
    {Kind.WELCOME, Kind.REFUSED, Kind.NEED, Kind.FILE_ACK, Kind.READY, Kind.RESULT, Kind.FAILED, Kind.PROBE}
    | {Kind.EXCHANGE}
)


@dataclass(frozen=True)
class Message:
    """One message: its kind, its number in the channel, and a body of plain data and tensors."""

    kind: Kind
    number: int
    body: dict[str, Any] = field(default_factory=dict)
