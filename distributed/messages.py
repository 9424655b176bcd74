"""The messages of the protocol, in one table: who sends what, when, and what it carries.

A driver opens one channel per run and worker. The exchange, driver on the left:

    PAIR            ->              name and key of a driver that has a pairing code, and nothing else
                    <-  PAIRED      name of the worker
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
    FREE            ->              let go of models of these files; nothing is answered

Answers carry the number of the message that they answer. PROBE only tells whether the driver is still connected.
To measure the link, after WELCOME:

    ECHO            ->              any tensor, and how many bytes to answer with
                    <-  ECHO        so many bytes
    SINK            ->              for the rate of plain TCP: a secret
                    <-  SINK        the port that takes TCP connections which begin with it, for a few seconds
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
    PAIR = 4
    PAIRED = 5
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
    FREE = 32
    PROBE = 40
    ECHO = 41
    SINK = 42


# Of a session that was let in, with its HELLO.
FROM_DRIVER = frozenset(
    {
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
        Kind.FREE,
        Kind.ECHO,
        Kind.SINK,
    }
)
FROM_WORKER = frozenset(
    {Kind.WELCOME, Kind.REFUSED, Kind.NEED, Kind.FILE_ACK, Kind.READY, Kind.RESULT, Kind.FAILED, Kind.PROBE}
    | {Kind.EXCHANGE, Kind.PAIRED, Kind.ECHO, Kind.SINK}
)


@dataclass(frozen=True)
class Message:
    """One message: its kind, its number in the channel, a body of plain data and tensors, and its size as it came."""

    kind: Kind
    number: int
    body: dict[str, Any] = field(default_factory=dict)
    nbytes: int = field(default=0, compare=False)
