"""Numbers in the documents come from the records in benchmarks/results, and nothing slower is left out of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from monarch_split.benchmarks.publish import BEGIN, DOCUMENTS, END, SENTENCES, published, record, with_sentences

ROOT = Path(__file__).parent.parent
WITH_PROSE = sorted(
    str(path.relative_to(ROOT).as_posix())
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("web/docs/*.md")]
)
_UNITS = r"x|%|ms|s|seconds?|minutes?|times|microseconds?|[kMG]i?B(?:/s)?|[kMG]b/s"
NUMBER = re.compile(rf"(?<![\w.])\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)?(?:\s?(?:{_UNITS}))(?!\w)")

# Numbers with a unit that nobody measured here, and what they are.
NOT_MEASURED = {
    ("FAQ.md", "2x"): "what two machines come to at most",
    ("FAQ.md", "5.5 s"): "as its users published it",
    ("FAQ.md", "7.6 s"): "as its users published it",
    ("FAQ.md", "8.2-8.5 s"): "as its users published it",
    ("FAQ.md", "2 MB/s"): "a limit",
    ("FAQ.md", "50 ms"): "what the link was set to",
    ("SECURITY.md", "8 MB"): "a limit",
    ("docs/families.md", "6 x"): "a count",
    ("docs/families.md", "10 %"): "a limit (limits.CHECK_TOLERANCE_COMPRESSED)",
    ("docs/families.md", "0.5 %"): "a bound that tests hold",
    ("docs/network.md", "2 MB/s"): "a limit",
    ("docs/network.md", "200 Gb/s"): "what the cable is sold as",
    ("docs/network.md", "100 Gb/s"): "what the cable is sold as",
}


def prose(name: str) -> str:
    """A document without what stands between marks and without the sentences that are made from records."""
    text = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", " ", (ROOT / name).read_text(encoding="utf-8"), flags=re.S)
    for sentence in SENTENCES:
        if sentence.document == name:
            text = sentence.pattern().sub(" ", text)
    return text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_say_what_the_records_say(name: str) -> None:
    text = (ROOT / name).read_text()
    assert published(text, DOCUMENTS[name]) == text, "run python benchmarks/publish.py"


@pytest.mark.parametrize("name", sorted({sentence.document for sentence in SENTENCES}))
def test_sentences_say_what_the_records_say(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert with_sentences(name, text) == text, "run python benchmarks/publish.py"


@pytest.mark.parametrize("name", WITH_PROSE)
def test_a_number_that_comes_from_no_record_is_not_published(name: str) -> None:
    unknown = {
        number: " ".join(text[max(0, at - 60) : at + 40].split())
        for text in [prose(name)]
        for number, at in ((" ".join(found[0].split()), found.start()) for found in NUMBER.finditer(text))
        if (name, number) not in NOT_MEASURED
    }
    assert not unknown, "have benchmarks/publish.py make it from a record, or say in NOT_MEASURED what it is"


def test_what_is_said_not_to_be_measured_still_stands_there() -> None:
    there = {(name, " ".join(found[0].split())) for name in WITH_PROSE for found in NUMBER.finditer(prose(name))}
    assert set(NOT_MEASURED) <= there


def test_a_number_in_a_sentence_without_its_record_is_found() -> None:
    sentence = SENTENCES[0]
    text = sentence.text.replace("{}", "9.9 GB").replace(" ", "\n", 3)
    assert "9.9 GB" not in with_sentences(sentence.document, " ".join([text, *(each.text for each in SENTENCES[1:])]))
    with pytest.raises(LookupError):
        with_sentences(sentence.document, "It says something else.")


@pytest.mark.parametrize("name", ["gpu_row_split", "gpu_token_split"])
def test_what_is_slower_when_it_is_split_is_published_too(name: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [
        (result["model"], result["ratio"])
        for result in record(name)["results"]
        if f"{result['ratio']:.2f}x" not in readme
    ]
    assert not missing


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_record_says_what_it_is_of_and_is_named_after_the_script_that_makes_it(path: Path) -> None:
    made = json.loads(path.read_text())
    assert made.get("what")
    assert made.get("date")
    assert any(path.stem.startswith(script.stem) for script in (ROOT / "benchmarks").glob("*.py"))
