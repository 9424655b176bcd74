"""Joins two machines by one code: the worker prints it, the driver is given it, and each then knows the other's key.

A code holds the worker's addresses and public key and a one-time token, from which both derive a CURVE key pair. The
driver connects with that pair, so a stranger is refused within the handshake; the worker keeps only its public half.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import ipaddress
import json
import os
import platform
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import zmq.utils.z85 as z85

from . import limits
from .addresses import Address, parse_address
from .auth import KEY_LENGTH, AuthError, ChannelKeys, KeyPair, Paired, Pairings, own_identity, private_text
from .channel import UNKNOWN_KEY, ChannelLost
from .driver_channel import DriverChannel
from .folders import configuration_folder, write_private
from .messages import Kind, Message
from .versions import own_versions

_PREFIX = "monarch1-"
_TOKEN_BYTES, _KEY_BYTES, _CHECK_BYTES = 16, 32, 4
_MAX_NAME = limits.MAX_NAME


_USED_UP = "the code is used up or too old"


class PairingError(Exception):
    """The machines could not be paired; the message says why and what to do."""


# --- on the worker ----------------------------------------------------------------------------------------------------


def issue_code(addresses: Sequence[Address]) -> str:
    """A new code for this machine's worker at `addresses`, valid once, for PAIRING_CODE_SECONDS. Raises AuthError."""
    token = os.urandom(_TOKEN_BYTES)
    record = {"key": _one_time_pair(token).public.decode(), "until": time.time() + limits.PAIRING_CODE_SECONDS}
    own = own_identity()
    # What is the loopback here is another machine's there, unless all is meant for one end of a tunnel.
    addresses = [address for address in addresses if not address.is_loopback] or addresses
    try:
        write_private(_token_path(), json.dumps(record) + "\n")
    except OSError as error:
        raise AuthError(f"{_token_path()} cannot be written ({error.strerror or error})") from None
    return _encode(addresses, own.public, token)


@contextlib.contextmanager
def announced(addresses: Sequence[Address]) -> Iterator[None]:
    """Within it, `running_worker` tells other processes of this user where this machine's worker listens."""
    path = configuration_folder() / f"worker-{addresses[0].port}.json"
    try:
        write_private(path, json.dumps({"addresses": [str(address) for address in addresses]}))
        # As long as this process lives, and no longer, somebody holds the lock.
        lock = os.open(path, os.O_RDWR)
        _lock(lock)
    except OSError as error:
        raise AuthError(f"{path} cannot be written ({error.strerror or error})") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(lock)


def running_worker() -> tuple[Address, ...]:
    """Where this machine's worker listens; of several, one of them. Raises AuthError if none is running."""
    for path in sorted(configuration_folder().glob("worker-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if _is_locked(path):
                return tuple(parse_address(address) for address in json.loads(private_text(path))["addresses"])
    raise AuthError("no worker of this user is running on this machine; start it first, with --listen")


def _lock(descriptor: int) -> None:
    """Raises BlockingIOError if somebody has locked the file."""
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        _lock(descriptor)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return os.name == "nt"  # where nothing tells, a worker that was killed counts as running


def open_token() -> bytes | None:
    """The public key that a driver with the current code shows, in Z85; None if there is no code or it is too old.

    Raises AuthError if others could have written it.
    """
    try:
        record = json.loads(private_text(_token_path()))
        left = float(record["until"]) - time.time()
        key = str(record["key"]).encode()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key if 0 < left <= limits.PAIRING_CODE_SECONDS and len(key) == KEY_LENGTH else None


def admit(body: dict[str, object], shown: bytes) -> Paired:
    """Serve the driver that a PAIR message names from now on; its code is used up. Raises AuthError, ValueError.

    shown: the key that goes with its code; another driver may have been quicker.
    """
    if open_token() != shown:
        raise ValueError(_USED_UP)
    key = str(body.get("key")).encode()
    try:
        whole = len(key) == KEY_LENGTH and len(z85.decode(key)) == _KEY_BYTES
    except (LookupError, ValueError, struct.error):
        whole = False
    if not whole:
        raise ValueError("a driver without a key asks to be paired")
    try:
        _token_path().unlink()  # by one of this machine's workers alone
    except FileNotFoundError:
        raise ValueError(_USED_UP) from None
    return Pairings.add_driver(Paired(_name(body.get("name")), key))


def _token_path() -> Path:
    return configuration_folder() / "pairing-code.json"


# --- on the driver ----------------------------------------------------------------------------------------------------


def pair(code: str, *, addresses: Sequence[Address] = ()) -> Paired:
    """Pair with the worker that printed `code`, and remember it. Raises PairingError and AuthError.

    addresses: where to reach it instead of at the addresses in the code (through a tunnel, or by name).
    """
    told, server, token = _decode(code)
    own = own_identity()
    if server == own.public:
        raise PairingError(
            "the code is of a worker with this machine's own keys. A worker of this user on this machine needs no "
            "pairing; if it is another machine whose configuration folder was copied from here, remove identity.json "
            "from the one there and start its worker again"
        )
    refusals = []
    for answering in addresses or told:
        try:
            greeting = {"name": platform.node() or "driver", "key": own.public.decode()}
            answer = _ask(answering, ChannelKeys(_one_time_pair(token), server), Kind.PAIR, greeting)
            break
        except ChannelLost as error:
            refusals.append(str(error))
    else:
        if not any(UNKNOWN_KEY in refusal for refusal in refusals):
            raise PairingError(f"the worker could not be reached: {'; '.join(refusals)}")
        raise PairingError(f"{_USED_UP}; print a new one on the worker's machine with `monarch pair --new-code`")
    if answer.kind is not Kind.PAIRED:
        raise PairingError(f"the worker refused: {answer.body.get('reason')}")
    keys = ChannelKeys(own, server)
    proven = [address for address in addresses or told if address == answering or _answers(address, keys)]
    return Pairings.add_worker(Paired(_name(answer.body.get("name")), server, tuple(proven)))


def _answers(address: Address, keys: ChannelKeys) -> bool:
    """Whether the worker, and not another machine or this one, is at an address, too."""
    with contextlib.suppress(ChannelLost):
        return bool(_ask(address, keys, Kind.HELLO, {"lanes": 1, **own_versions(None).as_dict()}))
    return False


def _ask(address: Address, keys: ChannelKeys, kind: Kind, body: Mapping[str, object]) -> Message:
    """The answer to the only message of a channel. Raises ChannelLost."""
    with contextlib.closing(DriverChannel(address.host, address.port, lanes=1, keys=keys)) as channel:
        channel.send(kind, dict(body))
        deadline = time.monotonic() + limits.HELLO_TIMEOUT
        while time.monotonic() < deadline:
            for message in channel.receive(limits.POLL_SECONDS):
                return message
    raise ChannelLost(f"what listens at {address} does not answer; start the worker there again")


def _name(value: object) -> str:
    """A machine's name as it may be printed: one short line."""
    text = "".join(character for character in str(value or "") if character.isprintable())[:_MAX_NAME].strip()
    return text or "unnamed"


# --- the code ---------------------------------------------------------------------------------------------------------


def _one_time_pair(token: bytes) -> KeyPair:
    secret = hashlib.blake2b(token, digest_size=_KEY_BYTES, person=b"monarch pairing").digest()
    return KeyPair.of_secret(z85.encode(secret))


def _encode(addresses: Sequence[Address], server: bytes, token: bytes) -> str:
    port = addresses[0].port
    packed = [ipaddress.ip_address(address.host.partition("%")[0]).packed for address in addresses]
    body = token + z85.decode(server) + struct.pack("<H", port) + b"".join(bytes([len(ip)]) + ip for ip in packed)
    return _PREFIX + base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")


def _decode(code: str) -> tuple[tuple[Address, ...], bytes, bytes]:
    """(addresses, server key in Z85, token) of a code. Raises PairingError for one that is not whole."""
    text = "".join(code.split())  # a terminal may have broken the line
    try:
        if not text.startswith(_PREFIX):
            raise ValueError
        text = text.removeprefix(_PREFIX)
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if check != _check(body):
            raise ValueError
        token, key, rest = body[:_TOKEN_BYTES], body[_TOKEN_BYTES:][:_KEY_BYTES], body[_TOKEN_BYTES + _KEY_BYTES :]
        (port,) = struct.unpack_from("<H", rest)
        addresses, at = [], 2
        while at < len(rest):
            length = rest[at]
            addresses.append(Address(str(ipaddress.ip_address(rest[at + 1 : at + 1 + length])), port))
            at += 1 + length
        if not addresses:
            raise ValueError
    except (ValueError, struct.error, binascii.Error):
        raise PairingError(
            "this is not a whole pairing code: copy all of the line that begins with monarch1- as the worker printed it"
        ) from None
    return tuple(addresses), z85.encode(key), token


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()
