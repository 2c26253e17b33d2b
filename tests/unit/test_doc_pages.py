"""Checks the pages themselves: links lead somewhere, the index and the glossary are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as they stand in links."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [each.name for each in ROOT.glob("docs/*.md") if each.name != "README.md"]
    assert [name for name in pages if f"]({name}" not in index] == []


def test_the_glossary_names_what_the_code_has() -> None:
    code = "\n".join(each.read_text() for each in ROOT.glob("src/pxrs/**/*.py"))
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"`(?:px\.|message\.|item\.)?(\w+)(?:\.py|\(\)|=)?`", glossary)
    assert len(words) > 20
    assert [word for word in words if not re.search(rf"\b{word}\b", code)] == []


@pytest.mark.parametrize("name", ["design.md", "decisions.md", "groups.md"])
def test_modules_that_are_named_exist(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    folders = ("src", "tests", "simulator", "engines", "docs")
    paths = [str(each) for folder in folders for each in (ROOT / folder).rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert [each for each in named if not any(path.endswith(f"/{each}") for path in paths)] == []
