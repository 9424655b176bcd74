"""A check of the doctor: what was looked at, how it went, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclass(frozen=True)
class Check:
    """One finding. status: PASS, WARN (it works, but not as well as it could) or FAIL; fix: the next step, if any."""

    name: str
    status: str
    detail: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        return self.status != FAIL

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "status": self.status, "detail": self.detail, "fix": self.fix}


def passed(name: str, detail: str) -> Check:
    return Check(name, PASS, detail)


def warned(name: str, detail: str, fix: str) -> Check:
    return Check(name, WARN, detail, fix)


def failed(name: str, detail: str, fix: str) -> Check:
    return Check(name, FAIL, detail, fix)


def failed_with(name: str, sentence: object) -> Check:
    """Of a message for users, which says what is wrong and, behind the first semicolon, what to do."""
    detail, _, fix = str(sentence).rstrip(".").partition("; ")
    return failed(name, detail, fix or "look at what the worker printed, and start it again")
