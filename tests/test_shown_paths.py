"""Folders of this machine do not get into what a browser shows; what only looks like a path stays."""

from __future__ import annotations

import pytest

from monarch_split.browser.paths import without_folders


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/.config/monarch/monarch.toml cannot be read", "monarch.toml cannot be read"),
        ("cluster 'a': 10.0.0.1:7690 (/etc/x/monarch.toml)", "cluster 'a': 10.0.0.1:7690 (monarch.toml)"),
        ("remove /a/b/identity.json; then go on", "remove identity.json; then go on"),
        ("named in ~/.config/monarch/monarch.toml.", "named in monarch.toml."),
        ("no model file in /models/one/, /models/two", "no model file in …, two"),
        (r"C:\Users\Me\AppData\monarch\monarch.toml is broken", "monarch.toml is broken"),
        ("0.23 GB/s over 2 lanes, 6 GB/s over TCP", "0.23 GB/s over 2 lanes, 6 GB/s over TCP"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("3/4 of the bytes, and/or less", "3/4 of the bytes, and/or less"),
        ("sub/folder/model.safetensors is held", "sub/folder/model.safetensors is held"),
        ("[fe80::1%eth0]:7690 answers", "[fe80::1%eth0]:7690 answers"),
    ],
)
def test_of_a_path_the_last_name_remains(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_known_folders_may_hold_spaces() -> None:
    text = "/home/my self/my config/monarch.toml and /home/my self/ComfyUI/models"
    assert without_folders(text, "/home/my self/my config", home="/home/my self") == "monarch.toml and models"
