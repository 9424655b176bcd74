"""Numbers in the documents come from the records in benchmarks/results, and nothing slower is left out of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monarch_split.benchmarks.publish import BEGIN, DOCUMENTS, END, published

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_say_what_the_records_say(name: str) -> None:
    text = (ROOT / name).read_text()
    assert published(text, DOCUMENTS[name]) == text, "run python benchmarks/publish.py"


def test_no_speed_up_is_claimed_outside_of_the_published_numbers() -> None:
    readme = (ROOT / "README.md").read_text()
    unmarked = readme.split(BEGIN)[0] + readme.split(END)[1]
    for name, text in (("README.md", unmarked), ("FAQ.md", (ROOT / "FAQ.md").read_text())):
        assert not re.findall(r"\b\d+\.\d+x\b", text), name
