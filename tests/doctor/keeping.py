"""The catalogue of promises, tried in boxes of another kind."""

from __future__ import annotations

from collections.abc import Collection

from ringfence.core.ports import Backend
from ringfence.doctor import CATALOGUE, Options, run


async def kept(backend: Backend, left_out: Collection[str]) -> int:
    """How many cases there were, each of them kept; the backend is closed then."""
    cases = tuple(case for case in CATALOGUE if case.id not in left_out)
    try:
        report = await run(backend, Options(cases=cases, controls=False))
    finally:
        await backend.close()
    broken = {result.case.id: result.got for result in report.results if result.kept is False}
    assert broken == {}, broken
    return len(report.results)
