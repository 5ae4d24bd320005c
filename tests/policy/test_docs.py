"""The documentation points at things that exist and lists what there is."""

import re
from pathlib import Path

import pytest

from policy.checkout import ROOT, files

PAGES = sorted(files("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The fragments GitHub makes of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", ""))
        found.add(text.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_glossary_is_sorted_and_defines_each_term_once() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    terms = [term for term in re.findall(r"^\| (.+?) \|", text, flags=re.MULTILINE) if term != "term"]
    assert len(terms) > 30
    assert terms == sorted(set(terms), key=str.lower)
