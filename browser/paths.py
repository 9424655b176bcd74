"""Keeps folders of this machine out of what a browser is shown: of a path, the last name remains."""

from __future__ import annotations

import re

# At the start of a word: "GB/s", "1/2" and what follows "https:/" are no paths. A name may hold a dot, not end in one.
_POSIX = re.compile(r"(?<![\w/:.~])~?/(?:[^\s/:;,()'\"]+/)+([^\s/:;,()'\"]*[^\s/:;,()'\".])?")
_WINDOWS = re.compile(r"(?<!\w)[A-Za-z]:\\(?:[^\\/:*?\"<>|\r\n]+\\)*([^\\/:*?\"<>|\s;,()']*)")


def without_folders(text: str, *folders: str, home: str = "") -> str:
    """`text` with paths cut to their last name; `folders` and `home` are known ones, which may hold spaces."""
    for folder in sorted(filter(None, folders), key=len, reverse=True):
        for separator in "/\\":
            text = text.replace(folder.rstrip("/\\") + separator, "")
    if home:
        text = text.replace(home, "~")
    text = _POSIX.sub(lambda match: match[1] or "…", text)
    return _WINDOWS.sub(lambda match: match[1] or "…", text)
