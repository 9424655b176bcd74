"""Who gets in: answers ZeroMQ's question about each client (ZAP, RFC 27) before a byte of that client is read.

Runs beside the sockets of one context, in a thread of its own. A worker's Doorkeeper reads the pairings anew for each
question, so that a machine that was removed is refused at its next connection; RanksOnly knows one exchange's keys.
"""

from __future__ import annotations

import hmac
import threading
import time
from abc import ABC, abstractmethod
from collections import deque

import zmq
import zmq.utils.z85

from . import limits
from .auth import DOMAIN, OWN, PAIRING, ExchangeKeys, KeyPair, Pairings
from .jobs import say
from .pairing import open_token

# A client that has shown this many unknown keys from one address within that time cannot pair from there for as long.
_REMEMBERED_ADDRESSES = 1024


class _Admission(ABC):
    """Answers for all sockets of a context that have DOMAIN, until it is closed (before the context is)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._sock = context.socket(zmq.REP)
        self._sock.bind("inproc://zeromq.zap.01")
        self._stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop.bind(f"inproc://doorkeeper-{id(self)}")
        self._stopped.connect(f"inproc://doorkeeper-{id(self)}")
        self._thread = threading.Thread(target=self._run, name="monarch-doorkeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sock, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while self._stopped not in dict(poller.poll()):
            frames = self._sock.recv_multipart()
            is_ours = len(frames) >= 6 and frames[0] == b"1.0" and frames[2] == DOMAIN
            user = self._user(frames[3].decode("ascii", "replace"), frames[5], frames[6:]) if is_ours else None
            code, text = (b"200", b"OK") if user else (b"400", b"unknown key")
            request = frames[1] if len(frames) > 1 else b""
            self._sock.send_multipart([b"1.0", request, code, text, (user or "").encode(), b""])
        self._sock.close(linger=0)
        self._stopped.close(linger=0)

    @abstractmethod
    def _user(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """Who asks to come in; None if they may not."""


class RanksOnly(_Admission):
    """Lets in who has the keys of an exchange. A stranger who has read its public key is none of them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ExchangeKeys) -> None:
        self._keys = keys
        super().__init__(context)

    def _user(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str | None:
        pair = self._keys.pair
        wanted = (b"CURVE", zmq.utils.z85.decode(pair.public)) if self._keys.encrypted else (b"PLAIN", pair.secret)
        is_rank = mechanism == wanted[0] and credentials and hmac.compare_digest(credentials[-1], wanted[1])
        return "a rank" if is_rank else None


class Doorkeeper(_Admission):
    """Lets in this user and paired drivers, and who has a pairing code."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], own: KeyPair) -> None:
        """own: the pair of this machine, whose holder is let in too: it is the same user."""
        self._own = own.public
        self._refused: dict[str, deque[float]] = {}
        super().__init__(context)

    def _user(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str | None:
        if mechanism != b"CURVE" or len(credentials) != 1:
            return None
        address = address.removeprefix("::ffff:")
        try:
            key = zmq.utils.z85.encode(credentials[0])
            if hmac.compare_digest(key, self._own):
                return OWN
            if any(hmac.compare_digest(key, driver.key) for driver in Pairings.load().drivers):
                return key.decode()
            if self._may_pair(address):
                token = open_token()
                if token is not None and hmac.compare_digest(key, token):
                    return PAIRING + key.decode()
        except Exception as error:  # whatever it is, the next one may ask
            say(f"Nobody can be let in: {error}", error=True)
            return None
        self._note_refusal(address)
        return None

    def _may_pair(self, address: str) -> bool:
        since = time.monotonic() - limits.PAIRING_ATTEMPTS_SECONDS
        return sum(when > since for when in self._refused.get(address, ())) < limits.PAIRING_ATTEMPTS

    def _note_refusal(self, address: str) -> None:
        refused = self._refused.pop(address, None)
        if refused is None:
            refused = deque(maxlen=limits.PAIRING_ATTEMPTS)
            say(f"{address} was refused: its key is not known here. To pair it, see `monarch pair --new-code`.")
        refused.append(time.monotonic())
        self._refused[address] = refused
        while len(self._refused) > _REMEMBERED_ADDRESSES:
            del self._refused[next(iter(self._refused))]
