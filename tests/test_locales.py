"""The texts in every language: none is missing, none is left over, and placeholders are those of the English text.

What nodes say in English is in nodes/ as well; tests/comfy/test_node_definitions.py compares."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACK = Path(__file__).parent.parent
LANGUAGES = ("en", "zh", "ru", "ja", "de")
FILES = ("main", "nodeDefs", "settings")
PAGE = {path.name: path.read_text(encoding="utf-8") for path in sorted((PACK / "web").glob("*.js"))}


def texts(language: str, file: str) -> dict[tuple[str, ...], str]:
    """Every text of a file, by the keys that lead to it."""
    data = json.loads((PACK / "locales" / language / f"{file}.json").read_text(encoding="utf-8"))
    return dict(_leaves(data, ()))


def _leaves(data: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    else:
        assert isinstance(data, str), path
        yield path, data


def test_there_is_nothing_but_these_languages_and_files() -> None:
    found = {path.relative_to(PACK / "locales").as_posix() for path in (PACK / "locales").rglob("*") if path.is_file()}
    assert found == {f"{language}/{file}.json" for language in LANGUAGES for file in FILES}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_a_language_has_the_texts_of_the_english_file_and_no_other(language: str, file: str) -> None:
    english, other = texts("en", file), texts(language, file)
    assert sorted(english.keys() - other.keys()) == [], "not translated"
    assert sorted(other.keys() - english.keys()) == [], "left over"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_no_text_is_empty_and_placeholders_are_kept(language: str, file: str) -> None:
    english = texts("en", file)
    for key, text in texts(language, file).items():
        assert text.strip() == text != "", key
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", english[key])), key


@pytest.mark.parametrize(
    ("language", "letters"), [("zh", r"[\u4e00-\u9fff]"), ("ja", r"[\u3040-\u30ff]"), ("ru", r"[а-я]")]
)
def test_long_texts_are_in_the_language_of_their_folder(language: str, letters: str) -> None:
    for file in FILES:
        for key, text in texts(language, file).items():
            assert len(text) < 30 or re.search(letters, text), key


def test_every_text_of_the_page_is_there_and_none_is_left_over() -> None:
    known = {".".join(key[1:]) for key in texts("en", "main") if key[0] == "monarch"}
    source = "\n".join(PAGE.values())
    used = set(re.findall(r"\bt\('([\w.]+)'", source))
    parts = set(re.findall(r"\bt\(`([\w.]+)\.\$\{", source))
    # Some are chosen between first: t(this ? 'a' : 'b').
    quoted = set(re.findall(r"'([\w.]+)'", source))
    assert not used - known
    assert not {key for key in known if key not in quoted and key.rpartition(".")[0] not in parts}


def test_every_setting_and_option_of_the_dialog_has_its_texts_and_none_is_left_over() -> None:
    source = PAGE["settings.js"]
    settings = {name.replace(".", "_") for name in re.findall(r"setting\('([\w.]+)'", source)}
    options = {text.replace(".", "_") for text in re.findall(r"text: '([^']+)'", source)}
    known = texts("en", "settings")
    assert {key[0] for key in known} == settings
    assert {(key, part) for key in settings for part in ("name", "tooltip")} <= set(known)
    assert {key[2] for key in known if key[1] == "options"} == options


def test_options_fit_the_lists_of_the_settings_dialog() -> None:
    for language in LANGUAGES:
        for key, text in texts(language, "settings").items():
            if key[1] == "options":
                width = sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
                assert width <= 12, f"{language}: it is shown with ... at its end: {text}"


def test_python_installs_them_with_the_pack() -> None:
    project = (PACK / "pyproject.toml").read_text(encoding="utf-8")
    (data,) = re.findall(r"^monarch_split = \[(\"web.*)\]$", project, re.MULTILINE)
    assert '"locales/**/*"' in data
