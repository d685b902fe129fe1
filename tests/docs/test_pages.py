"""Documents: every link leads somewhere, every file that is named exists, and no line of prose is too long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tooling import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
BASES = (ROOT, ROOT / "src", ROOT / "src/ringfence", ROOT / "hosts")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose(page: Path) -> str:
    return re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_ours_that_is_named_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it tells what was
    named = re.findall(r"`((?:\.\./)*(?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", page.read_text())
    ours = ("src/", "tests/", "hosts/", "core/", "governance/", "sandbox/", "store/", "front/", "config/", "egress/")
    missing = [path for path in named if path.startswith(ours) and not any((base / path).exists() for base in BASES)]
    assert missing == []
    known = {
        path.name
        for folder in ("src", "tests", "hosts", "scripts", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    if page.parent.name == "docs" and not page.name.startswith(("tutorial", "servers", "cli", "images", "packages")):
        alone = re.findall(r"`([a-z_0-9]+\.py)`", prose(page))
        assert [name for name in alone if name not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_prose_is_too_long(page: Path) -> None:
    long = [line for line in prose(page).splitlines() if len(line) > 120 and not line.startswith("|")]
    assert [line for line in long if " " in line.strip()[:100]] == []


def test_no_page_installs_ringfence_from_an_index_where_it_is_not() -> None:
    named = re.compile(r"(?:pip|pipx|uv tool|uv pip) install [^\n`#]*(?<![\w/-])ringfence(?:\[\w+\])?(?=[\s'`]|$)")
    pages = [page for page in PAGES if page.parent.name != "decisions"]  # which tell what was
    found = {str(page.relative_to(ROOT)): named.findall(page.read_text()) for page in pages}
    assert {page: lines for page, lines in found.items() if lines} == {}
