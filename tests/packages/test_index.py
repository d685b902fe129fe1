"""The index as one box sees it: pages of what it may have, and files that a page of its own named."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import Installs
from ringfence.core.errors import Unavailable
from ringfence.packages.index import BoxIndex, IndexFile, Wheel

pytestmark = pytest.mark.anyio

SIX = IndexFile("six", "1.16.0", "six-1.16.0-py3-none-any.whl", "a" * 64, ">=2.7, <4")
NEWER = IndexFile("six", "1.17.0", "six-1.17.0-py3-none-any.whl", "b" * 64, yanked=True)
NEEDS = IndexFile("rich", "1.0", "rich-1.0.tar.gz", "c" * 64)
NEEDED = IndexFile("idna", "2.0+local", "idna-2.0+local-py3-none-any.whl", "d" * 64)


class Kept:
    """What is here already; whatever else is asked for fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.expected: list[str] = []

    async def offers(self, name: str) -> tuple[IndexFile, ...]:
        self.asked.append(name)
        if name == "broken":
            raise Unavailable("install_failed", "nobody\r\nanswers there")
        return tuple(each for each in (SIX, NEWER, NEEDS, NEEDED) if each.name == name)

    async def wheel(self, offer: IndexFile) -> Wheel:
        path = self.folder / offer.sha256
        path.write_bytes(offer.file.encode())
        needs = ("idna", "six") if offer is NEEDS else ()
        return Wheel(path, offer.sha256 if not offer.sources else "e" * 64, needs, needs)

    def expect(self, names: Iterable[str]) -> None:
        self.expected += names


def box_index(folder: Path, *names: str, required: Any = "any") -> BoxIndex:
    return BoxIndex(Kept(folder), Installs(names, required))


async def links(where: BoxIndex, name: str) -> list[str]:
    reply = await where.answer(f"/simple/{name}/")
    assert isinstance(reply.body, bytes)
    return re.findall(r'href="([^"]+)"', reply.body.decode())


async def test_a_page_has_what_there_is_with_its_hash(tmp_path: Path) -> None:
    reply = await box_index(tmp_path, "six").answer("/simple/Six/")
    assert isinstance(reply.body, bytes)
    page = reply.body.decode()
    assert f'<a href="/files/{"a" * 64}/six-1.16.0-py3-none-any.whl#sha256={"a" * 64}"' in page
    assert 'data-requires-python="&gt;=2.7, &lt;4"' in page and page.count("data-yanked") == 1


async def test_a_file_is_had_once_a_page_named_it_and_is_on_record(tmp_path: Path) -> None:
    mine = box_index(tmp_path, "six==1.16.0")
    target = f"/files/{SIX.sha256}/{SIX.file}"
    assert (await mine.answer(target)).status == 404
    assert await links(mine, "six") == [f"{target}#sha256={SIX.sha256}"]
    for _ in range(2):
        assert (await mine.answer(target)).body == tmp_path / SIX.sha256
    assert (await mine.answer(f"/files/{NEWER.sha256}/{NEWER.file}")).status == 404
    told = {"name": "six", "version": "1.16.0", "integrity": f"sha256:{SIX.sha256}", "count": 2}
    assert mine.handed_out() == (told,)


async def test_what_a_package_needs_comes_along_once_the_package_is_had(tmp_path: Path) -> None:
    mine = box_index(tmp_path, "rich")
    assert "refused" in (await links(mine, "idna"))[0]
    (link,) = await links(mine, "rich")
    assert link.startswith(f"/files/{NEEDS.sha256}/rich-1.0-1built-cp") and "#" not in link
    assert (await mine.answer(link)).status == 200
    assert await links(mine, "idna") == [
        f"/files/{NEEDED.sha256}/idna-2.0%2Blocal-py3-none-any.whl#sha256={NEEDED.sha256}"
    ]
    assert isinstance(mine._index, Kept) and mine._index.expected == ["idna", "six"]
    (had,) = mine.handed_out()
    assert (had["integrity"], had["built_from"]) == (f"sha256:{'e' * 64}", f"sha256:{NEEDS.sha256}")


async def test_where_hashes_are_required_nothing_comes_along(tmp_path: Path) -> None:
    mine = box_index(tmp_path, f"rich==1.0 --hash=sha256:{NEEDS.sha256}", required="hashed")
    (link,) = await links(mine, "rich")
    await mine.answer(link)
    assert "refused" in (await links(mine, "idna"))[0]
    assert isinstance(mine._index, Kept) and mine._index.expected == []


async def test_a_refusal_is_said_where_clients_show_it(tmp_path: Path) -> None:
    mine = box_index(tmp_path, "rich", "six==3", "broken")
    for name, words in (("other", "other may not be"), ("six", "no version of six"), ("broken", "nobody answers")):
        (link,) = await links(mine, name)
        reply = await mine.answer(link)
        assert (reply.status, reply.refused) == (403, "package_denied")
        assert reply.phrase.startswith(words) and "\n" not in reply.phrase
    index = mine._index
    assert isinstance(index, Kept) and index.asked == ["six", "broken"]


async def test_a_box_asks_for_so_many_names_and_no_more(tmp_path: Path) -> None:
    mine = box_index(tmp_path, "*")
    for number in range(500):
        assert (await mine.answer(f"/simple/name{number}/")).status == 404
    (link,) = await links(mine, "one-more")
    assert "that is enough" in (await mine.answer(link)).phrase
    assert (await mine.answer("/simple/name7/")).status == 404, "what it asked for already, it may ask for again"
    index = mine._index
    assert isinstance(index, Kept) and "one-more" not in index.asked


@pytest.mark.parametrize("entry", ["six", "*"])
async def test_what_is_refused_is_not_kept_however_much_is_asked_for(tmp_path: Path, entry: str) -> None:
    mine = box_index(tmp_path, entry)
    for number in range(3000):
        await mine.answer(f"/simple/x{number}{'y' * 80}/")
    for kept in (value for value in vars(mine).values() if isinstance(value, dict | set)):
        assert len(kept) <= 500
    (link,) = await links(mine, f"x2999{'y' * 80}")
    assert (await mine.answer(link)).refused == "package_denied"


@given(st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=60))
async def test_any_other_path_is_nothing(target: str) -> None:
    reply = await box_index(Path("/nonexistent"), "six").answer(f"/{target}")
    assert reply.status in (404, 403) or target.lower().startswith("simple/")
