"""How a measured number is written for a person."""

from __future__ import annotations


def figures(value: float) -> str:
    """Three significant figures, and never a power of ten: a video takes 1234 s, not 1.23e+03 s."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"
