"""What files of models are called here, by digest: workers tell of models by that alone."""

from __future__ import annotations

# Hexadecimal digits of a digest that a worker tells.
SHORT = 12
_UNKNOWN = "?"


class Names:
    """Files that renders of this process used."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def note(self, digest: str, name: str) -> None:
        self._names[digest[:SHORT]] = name

    def get(self, digest: str) -> str:
        """The name, or a question mark for a file that this process has not used."""
        return self._names.get(digest[:SHORT], _UNKNOWN)


names = Names()
