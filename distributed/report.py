"""What happened in one run: counted while it runs, told in one line when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _add(sentences: list[str], sentence: str) -> None:
    """Once each, without the full stop that the line ends with."""
    sentence = sentence.rstrip(".")
    if sentence not in sentences:
        sentences.append(sentence)


@dataclass
class Report:
    """Counts and costs of one run. Times in seconds, traffic in bytes; a forward is one call of the diffusion model."""

    mode: str
    steps: int = 0
    forwards: int = 0
    forwards_split: int = 0
    split: str | None = None
    # Whether forwards split by tokens swapped less than what they had.
    approximate: bool = False
    # What each node computed of the last split forward: rows, or its part of the tokens.
    rows: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    # Both without waiting for workers that load. The first forward also loads and warms up on this machine.
    seconds: float = 0.0
    first_seconds: float = 0.0
    waiting: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    # Of the forwards split by rows: the computing of the slowest node; what else they took is the engine's own cost.
    busy_seconds: float = 0.0
    split_seconds: float = 0.0
    alone_seconds: float = 0.0
    # How many times as fast as this machine alone the last split was expected to be, before the first of its kind.
    predicted: float | None = None
    reasons: list[str] = field(default_factory=list)
    # Those of the reasons for which nothing but `auto` decided against splitting.
    choices: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    # Those of the events that cost the run a worker, for a while at least.
    failures: list[str] = field(default_factory=list)

    def add_reason(self, reason: str) -> None:
        """Why forwards ran on the driver alone."""
        _add(self.reasons, reason)

    def add_choice(self, reason: str) -> None:
        """Why `auto` ran forwards on the driver alone that could have been split."""
        _add(self.reasons, reason)
        _add(self.choices, reason)

    @property
    def hindrances(self) -> list[str]:
        """Why forwards could not be split."""
        return [reason for reason in self.reasons if reason not in self.choices]

    def add_event(self, event: str) -> None:
        """Something that happened to a worker during the run."""
        _add(self.events, event)

    def add_failure(self, event: str) -> None:
        """Why a worker was missing, or dropped out."""
        _add(self.events, event)
        _add(self.failures, event)

    def add_traffic(self, sent: int, received: int) -> None:
        """Bytes that went to workers and came from them."""
        self.bytes_sent += sent
        self.bytes_received += received

    @property
    def speedup(self) -> float | None:
        """Measured cost of the split forwards against the driver's own pace; None if nothing was split."""
        return self.alone_seconds / self.split_seconds if self.forwards_split and self.split_seconds else None

    @property
    def seconds_per_step(self) -> float | None:
        """Of a step after the first forward, as far as there are any."""
        if not self.steps:
            return None
        later = self.forwards - 1
        if later < 1:
            return self.seconds / self.steps
        return (self.seconds - self.first_seconds) / later * self.forwards / self.steps

    def line(self) -> str:
        """The run in one line for a person, with what matters first."""
        pace = f", {self.seconds_per_step:.3g} s/step" if self.seconds_per_step else ""
        if not self.forwards_split:
            why = "; ".join(self.reasons + self.events) or "there was nothing to split"
            return f"One machine{pace}: {why}."
        speedup = f"{self.speedup:.2f}x" if self.speedup else "Split"
        predicted = f" ({self.predicted:.2f}x predicted)" if self.predicted and self.speedup else ""
        given = self.rows or {node: f"{part:.0%}" for node, part in self.tokens.items()}
        shares = ", ".join(f"{node} {share}" for node, share in given.items())
        approximate = ", approximate (compressed exchange)" if self.approximate else ""
        line = (
            f"{speedup} on {len(given)} machines by {self.split}{approximate}{pace}{predicted}: "
            f"{self.forwards_split} of {self.forwards} forwards, {shares}."
        )
        notes = "; ".join(self.events + self.reasons)
        return f"{line} Note: {notes}." if notes else line

    def as_dict(self) -> dict[str, Any]:
        """Plain data for events, history and tests."""
        return {**vars(self), "speedup": self.speedup, "seconds_per_step": self.seconds_per_step, "line": self.line()}
