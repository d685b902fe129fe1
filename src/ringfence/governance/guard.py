"""What may go back. A result passes these checks in order: size, schema, fields, invisible characters, redaction, and
how much of it the contract gives to a model.

Unknown fields and content types stay as they are. Where no rule matches, the very object that came in goes out.
Characters that a reader does not see are removed from the texts of results. In keys, and in all that a person reads or
that describes a tool, they are escaped instead, so that nothing looks like what it is not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import re2

from ringfence.core import canonical, excerpt, invisible
from ringfence.core.aio import FairThreads
from ringfence.core.errors import Refused
from ringfence.core.model import Contract, Definition, GuardedText, Json, Status, Transport, own_words
from ringfence.core.ports import SAID_IN_CALLS, Channel, Redactor
from ringfence.core.record import dataclass
from ringfence.core.secret import REPLACEMENT
from ringfence.governance import disclosure
from ringfence.sandbox.tools import toolkit

log = logging.getLogger("ringfence.guard")

T = TypeVar("T")

CONTROL = "control_characters"
INVISIBLE = "invisible"
UNSEEN = (CONTROL, INVISIBLE)
"""Rules of characters that a reader does not see: gone from results, escaped in all else."""
FOREIGN = "foreign_keys"
"""Keys in a server's `_meta` that are ours to write."""

_MAX_HITS = 1000
"""A text that a pattern matches more often is withheld whole: each hit costs another search of the rest."""
_MAX_FOUND = 2000
"""Pieces that look like secrets in all texts of one value, which is withheld whole if there are more. One costs about
half a millisecond, and of what is left of so many no reader would miss anything."""
_MAX_IN_MESSAGE = 50
"""Such pieces in a message, which is withheld whole if there are more: it is searched while others wait."""
_MAX_JUDGED = 500
"""Pieces that may be missing in what a person is to judge. Each takes time in which others wait to be shown theirs."""
_SPEAKER = "ringfence/server"
MESSAGE_CHARACTERS = 4000
_BEYOND = 16_384
"""So much behind the end of what is shown is searched, too: a secret may go across it."""
_LONG = 65_536
"""Bytes. What is longer is searched in a thread, so that other calls are not held up."""
_DEAR = 4096
"""Bytes. So is what is longer than this and has something in it that goes, each piece of which costs."""
_INSPECTION_SECONDS = 10.0
"""What is searched in turns may take as long again as its call, and this long in any case: a server whose other values
take long to search holds up its own callers, who are told so."""
_MAX_SAID = 262_144
"""Bytes of what a server says or asks besides results. A result may be as long as its contract says."""

_CLASS = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in invisible.UNSEEN)
# On the encoded result, where C0 is written as an escape. May match where nothing is wrong, never the other way round.
_SUSPECT = re2.compile(rf"\\u00[01]|\\[bf]|[\x{{7f}}-\x{{9f}}{_CLASS}]")

_PROTOCOL = frozenset(
    {"content", "contents", "structuredContent", "isError", "_meta", "type", "text", "data", "blob", "mimeType", "uri"}
    | {"name", "title", "description", "annotations", "resource", "resultType", "messages", "role", "size"}
)
"""Names that need no look; any other key is text that a server chose."""
_WORDS = frozenset({"type", "mimeType", "role", "resultType"})
_BASE64 = frozenset({"data", "blob"})
_IS_BASE64 = re2.compile("[A-Za-z0-9+/]*=*")
_NOTHING: Mapping[str, int] = MappingProxyType({})

_SAME_KEY = "two keys of one object would look the same"


# Not frozen, which would triple what it costs: one is made for every call, and read once.
@dataclass(slots=True)
class Guarded:
    """A result as it may go on, or the problem for which it may not."""

    result: Json | None
    problem: tuple[str, GuardedText] | None
    """Reason code and text."""
    redactions: Mapping[str, int]
    trust: str
    encoded: bytes | None = None
    """The canonical form of `result`, which was needed here anyway."""
    secrets: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """Which secrets were removed, for the audit log alone."""
    shortened: bool = False
    """Whether texts were cut to what the contract lets a model have."""


@dataclass(slots=True)
class _Item:
    """A result on its way through the steps."""

    contract: Contract
    definition: Definition | None
    result: Json
    encoded: bytes
    hits: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    problem: tuple[str, str] | None = None
    """Reason code and text, which may hold names that the tool chose."""
    shortened: bool = False

    @property
    def complete(self) -> bool:
        """A tool's own success; an error is held to no output schema."""
        return not self.result.get("isError")


class _RuleHits(Counter[str]):
    """How often each rule matched."""

    def __init__(self, *, escape: bool = True, judged: bool = False, most: int | None = None) -> None:
        """Without `escape`, what a reader does not see is removed from texts. `judged` is what a person must decide
        on: it says what is missing, and not too much may be. `most` pieces may go from one text, which else goes whole,
        and then nobody asks which secrets they were."""
        super().__init__()
        self.escape = escape
        self.judged = judged
        self.most = most
        self.missing = 0
        """Pieces that were removed, as far as that is counted."""
        self.secrets: Counter[str] = Counter()
        self._found = 0

    def found(self, pieces: int) -> None:
        """So many more were found in a text. Raises _TooMuchFound."""
        self._found += pieces
        if self._found > _MAX_FOUND:
            raise _TooMuchFound


class _Withheld(Exception):
    """A value cannot be shown, not even in part."""

    code = "bad_output"
    text = ""


class _SameKey(_Withheld):
    """A key, with what cannot be seen in it escaped, is another key of the same object."""

    code = "ambiguous_keys"
    text = _SAME_KEY


class _TooMuchFound(_Withheld):
    """So much of a value looks like secrets that to take it out would take long."""

    text = f"more than {_MAX_FOUND} pieces look like secrets"


class _TooMuchMissing(Exception):
    """So much would be missing in what a person is shown that they could not judge it."""


class Guard:
    """Inspects results and texts on their way out."""

    def __init__(
        self, output_problem: Callable[[Definition, Any], str | None], redactor: Redactor | None = None
    ) -> None:
        self._output_problem = output_problem
        self.redactor = redactor
        """Another takes its place when the configuration does."""
        self.threads = FairThreads()
        """Where what servers send is worked on when it is long."""
        self._steps: tuple[Callable[[_Item], None], ...] = (
            self._kind,
            self._size,
            self._schema,
            self._fields,
            self._unforged,
            self._clean,
            self._shorten,
        )

    def inspect(
        self, contract: Contract, definition: Definition | None, result: Json, encoded: bytes | None = None
    ) -> Guarded:
        """The result as the contract allows it, or why it may not be passed on. `encoded`: in its canonical form."""
        trust = contract.result.trust
        try:
            encoded = canonical.dumps(result) if encoded is None else encoded
        except (ValueError, TypeError, RecursionError):
            return Guarded(None, ("bad_output", own_words("the tool's result is not plain JSON")), {}, trust)
        brackets = encoded.count(b"{") + encoded.count(b"[")  # cheap, and nearly always settles it
        if brackets > canonical.MAX_DEPTH and canonical.depth(result) > canonical.MAX_DEPTH:
            deep = ("bad_output", own_words("the tool's result is nested too deeply"))
            return Guarded(None, deep, {}, trust)
        item = _Item(contract, definition, result, encoded)
        for step in self._steps:
            try:
                step(item)
            except _Withheld as exc:
                item.problem = ("bad_output", f"in the tool's result {exc.text}")
            if item.problem is not None:
                code, text = item.problem
                return Guarded(None, (code, self.message(text, contract)), dict(item.hits), trust)
        if item.result is result:
            return Guarded(result, None, dict(item.hits), trust, encoded=encoded)
        kept = canonical.dumps(item.result)
        seen = item.hits.secrets if isinstance(item.hits, _RuleHits) else _NOTHING
        return Guarded(
            item.result,
            None,
            dict(item.hits),
            trust,
            encoded=kept,
            secrets=seen,
            shortened=item.shortened,
        )

    def message(self, text: str, contract: Contract | None = None, most: int = MESSAGE_CHARACTERS) -> GuardedText:
        """A text of ours or of a server's, fit to be shown, and no more of it than `most` characters."""
        patterns = _compiled(contract.redact) if contract is not None else ()
        text = text[: most + _BEYOND]
        proper = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
        suspect = invisible.suspect(proper)
        if not suspect and not patterns and len(proper) <= most:  # as nearly all are
            return GuardedText(proper if self.redactor is None else self.redactor.redact(proper, _MAX_IN_MESSAGE)[0])
        hits = _RuleHits(most=_MAX_IN_MESSAGE)
        try:
            if suspect:
                proper = self._seen(proper, patterns, hits, invisible.escaped)
            whole = self._redacted(proper, patterns, hits)
            fits = len(proper) <= most or whole == REPLACEMENT
            return GuardedText(whole if fits else self._cut(proper, patterns, most, whole))
        except _TooMuchFound:
            return GuardedText(REPLACEMENT)

    def _cut(self, text: str, patterns: tuple[Any, ...], place: int, whole: str) -> str:
        """The beginning of a text, as it is in the redacted whole. The place is one of the text as it came, so that it
        does not tell how long something was that is gone, and half of what goes is never left."""
        back = 0
        while back < place:
            head = text[: place - back]
            rest = text[place - back :]
            clean = self._redacted(head, patterns, _RuleHits(most=_MAX_IN_MESSAGE))
            if clean + self._redacted(rest, patterns, _RuleHits(most=_MAX_IN_MESSAGE)) == whole:
                return clean
            back = 2 * back + 1
        return ""

    def redacted(self, contract: Contract, value: Any) -> Any:
        """Any JSON value as it may be kept. Raises Refused."""
        return self.redact_with_counts(contract, value)[0]

    async def inspect_async(
        self, contract: Contract, definition: Definition | None, result: Json, whose: str | None = None
    ) -> Guarded:
        """The same as `inspect`, while others are served. `whose` turn it takes where it is long: its server's, unless
        that is nobody's own. Raises Refused where its turn is not over in time."""
        work = partial(self.inspect, contract, definition, result)
        return await self._beside(contract, result, work, whose)

    async def said(self, contract: Contract, params: Json) -> Json:
        """What a server says or asks, as a client may hear it. Raises Refused, also where it is too long."""
        return cast("Json", await self._said(contract, params, _MAX_SAID))

    async def error_data(self, contract: Contract, data: Any) -> Any:
        """What a server says beside an error. Raises Refused, also where it is too long."""
        return await self._said(contract, without_forged(data)[0], _LONG)

    async def _said(self, contract: Contract, value: Any, most: int) -> Any:
        size = _size_of(value)
        if size > most:
            raise Refused(Status.FAILED, "too_large", f"it has {size} bytes, and may have {most}")
        return await self._beside(contract, value, partial(self.redacted, contract, value), None)

    async def _beside(self, contract: Contract, value: Any, work: Callable[[], T], whose: str | None) -> T:
        """Do work on what a server sent, here only where that is sure to be short: size is no measure of what it costs
        where something in it goes."""
        if self._is_cheap(contract, value):
            return work()
        seconds = max(contract.timeout_seconds, _INSPECTION_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                return await self.threads.do(contract.server or whose or contract.tool, work)
        except TimeoutError:
            text = f"what came back could not be searched for secrets within {seconds:g} s, so it is withheld"
            raise Refused(Status.TIMEOUT, "timeout", text) from None

    def _is_cheap(self, contract: Contract, value: Any) -> bool:
        if not canonical.is_light(value, _LONG):
            return False
        try:
            encoded = canonical.dumps(value)
        except (ValueError, TypeError, RecursionError):
            return True  # found out at once
        if len(encoded) <= _DEAR:
            return True
        return len(encoded) <= _LONG and not (contract.redact or self._may_match(encoded) or _suspect(encoded))

    def redact_with_counts(self, contract: Contract, value: Any) -> tuple[Any, Mapping[str, int]]:
        """Any JSON value as a person may see it, and how often each rule matched: they must know that it is not all.

        Raises Refused where two of its keys would look the same.
        """
        hits = _RuleHits()
        try:
            return self._walk(value, _compiled(contract.redact), hits, keys=True), dict(hits)
        except _Withheld as exc:
            raise Refused(Status.VALIDATION_FAILURE, exc.code, exc.text) from None

    def redact_for_approval(self, contract: Contract, value: Any) -> tuple[Any, Mapping[str, int]]:
        """The same for a person who decides on it. What is only in the shape of a secret may be anything, code too: in
        its place stands that, and how long it is. Raises Refused also where too much would be missing."""
        hits = _RuleHits(judged=True)
        try:
            return self._walk(value, _compiled(contract.redact), hits, keys=True), dict(hits)
        except _Withheld as exc:
            raise Refused(Status.VALIDATION_FAILURE, exc.code, exc.text) from None
        except _TooMuchMissing:
            text = f"A person would have to judge it, and more than {_MAX_JUDGED} pieces of it look like secrets"
            raise Refused(Status.VALIDATION_FAILURE, "not_to_be_judged", text) from None

    def facts(self, facts: Json) -> Json:
        """Facts without what is unseen or secret in what others chose, such as names of files and hosts (`disclosure`).
        Names that cannot be shown cost their own facts and no more: a call is closed on record whatever they are."""
        if not any(disclosure.chosen_by_others(name, value) for name, value in facts.items()):
            return facts
        try:
            return self.listed(facts)
        except Refused:
            told: Json = {"files": None}
            for name, value in facts.items():
                with suppress(Refused):
                    told.update(self.listed({name: value}))
            problem = "names that its program chose cannot be told apart, so they are left out"
            return {**told, "trouble": [*told.get("trouble", ()), problem]}

    def listed(self, item: Json) -> Json:
        """What is said of tools, resources and runs, without secrets and with nothing unseen in it; the very same
        where there is neither. Raises Refused where two of its keys would look the same."""
        encoded = canonical.dumps(item)
        if not (self._may_match(encoded) or _suspect(encoded)):
            return item
        try:
            return cast("Json", self._walk(item, (), _RuleHits(), keys=True))
        except _Withheld as exc:
            raise Refused(Status.UNAVAILABLE, exc.code, exc.text) from None

    def holds_secret(self, item: Json) -> bool:
        """Whether a known secret stands in it, be it cut in two by what is not seen. What only has the shape of one may
        be an example. All texts are searched at once, so that it costs no more for one that holds many of them."""
        if self.redactor is None:
            return False
        texts = list(_texts(item))
        bare = [invisible.bare(invisible.without_controls(text)[0]) for text in texts if invisible.suspect(text)]
        return self.redactor.knows("\n".join((*texts, *bare)).encode("utf-8", "surrogatepass"))

    # ── The steps ─────────────────────────────────────────────────────────────────────────────────

    def _kind(self, item: _Item) -> None:
        # A question back was answered before this. What is neither would pass the next steps by.
        if item.result.get("resultType", "complete") != "complete":
            item.problem = ("invalid_result", "the server answered with a type of result that is not known here")
        elif item.definition is not None and item.definition.kind == "tool" and not _has_content(item.result):
            item.problem = ("invalid_result", "the server answered without content, which a tool's result must have")
        elif not isinstance(item.result.get("isError", False), bool):
            # What we take for true a client may not, and errors need not match the output schema.
            item.problem = ("invalid_result", "the server answered with an `isError` that is neither true nor false")

    def _size(self, item: _Item) -> None:
        most = item.contract.result.max_bytes
        if len(item.encoded) > most:
            text = f"the tool's result has {len(item.encoded)} bytes, the contract allows {most}"
            item.problem = ("result_too_large", text)

    def _schema(self, item: _Item) -> None:
        definition = item.definition
        if definition is None or definition.kind != "tool" or not item.complete:
            return
        problem = self._output_problem(definition, item.result.get("structuredContent"))
        if problem is not None:
            item.problem = ("bad_output", f"the tool's result does not fit its own schema: {problem}")

    def _fields(self, item: _Item) -> None:
        fields = item.contract.result.fields
        if fields is None:
            return
        kept = _only(item.result, frozenset(fields))
        if kept is None:
            item.problem = ("bad_output", "the contract names fields of the result, but the tool returned no object")
        else:
            item.result = kept
            item.encoded = canonical.dumps(kept)

    def _clean(self, item: _Item) -> None:
        # Control characters go before redaction looks: they could cut a secret in two that the reader joins again.
        patterns = _compiled(item.contract.redact)
        if patterns or self._may_match(item.encoded) or _suspect(item.encoded):
            hits = item.hits if isinstance(item.hits, _RuleHits) else _RuleHits(escape=False)
            item.result = self._walk(item.result, patterns, hits)
            item.hits = hits

    def _shorten(self, item: _Item) -> None:
        # Last: of a secret that is gone, nothing is left to be cut in two, and the place of a cut tells nothing of it.
        most = item.contract.result.max_chars
        own = item.contract.transport is Transport.SANDBOXED_EXEC
        if most is None or len(item.encoded) <= most or (own and item.contract.tool not in toolkit.PROGRAMS):
            return  # our tools that read files give them page by page
        whole, item.result = item.result, excerpt.shortened(item.result, most, structured=own)
        item.shortened = item.result is not whole

    def _unforged(self, item: _Item) -> None:
        # First, while what hides in a key has not been escaped: it is ours if it would look like one of ours.
        if not item.contract.is_served:
            return
        places = item.encoded.count(b'"_meta"')
        if places < 2:  # a look at the one place spares a walk through all
            meta = item.result.get("_meta")
            if places == 0 or (isinstance(meta, dict) and not any(map(looks_ours, meta))):
                return
        item.result, dropped = without_forged(item.result)
        if dropped:
            item.encoded = canonical.dumps(item.result)
            item.hits = _RuleHits(escape=False)
            item.hits[FOREIGN] += dropped

    def _may_match(self, encoded: bytes) -> bool:
        """One look at the encoded result settles it for all texts in it; escapes may hide where a word begins.

        May be true where nothing would go, never the other way round.
        """
        if self.redactor is None:
            return False
        if self.redactor.matches(encoded):
            return True
        if b"\\" not in encoded:
            return False
        if b"\\u" in encoded or b"\\b" in encoded or b"\\f" in encoded:
            return True
        plain = encoded.replace(b"\\n", b"\n").replace(b"\\t", b"\t").replace(b"\\r", b"\r")
        return self.redactor.matches(plain)

    # ── Texts ─────────────────────────────────────────────────────────────────────────────────────

    def _walk(self, value: Any, patterns: tuple[Any, ...], hits: _RuleHits, *, keys: bool = False) -> Any:
        """`value` with every text in it cleaned; itself where nothing was found. Its depth is bounded already.

        With `keys` it is data, no protocol: a contract's patterns then speak of the names in it too.
        """
        if isinstance(value, str):
            return self._cleaned(value, patterns, hits)
        if isinstance(value, dict):
            out: Json = {}
            changed = False
            alike: Counter[str] = Counter()
            for key, old in value.items():
                name = key
                if keys or key not in _PROTOCOL:
                    name = self._name(key, patterns if keys else (), hits, value)
                    name = _free(name, out, alike)
                own = () if patterns and not keys and _opaque(key, old) else patterns
                new = self._walk(old, own, hits, keys=keys or key == "structuredContent")
                changed = changed or new is not old or name is not key
                out[name] = new
            return out if changed else value
        if isinstance(value, list):
            items = [self._walk(old, patterns, hits, keys=keys) for old in value]
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        return self._number(value, hits) if isinstance(value, int | float) else value

    def _number(self, value: float, hits: _RuleHits) -> Any:
        """A number, unless its digits are a known secret. What only has the shape of one is a number like any other."""
        if self.redactor is None or isinstance(value, bool):
            return value
        text = _digits(value)
        names = self.redactor.secrets(text)
        if not any(names.values()):
            return value
        hits.update(self.redactor.redact(text)[1])
        hits.secrets.update(names)
        return REPLACEMENT

    def _name(self, key: str, patterns: tuple[Any, ...], hits: _RuleHits, siblings: Mapping[str, Any]) -> str:
        """A key, cleaned: what is unseen in it is escaped whatever becomes of texts. Raises _SameKey."""
        if not invisible.suspect(key):
            return self._redacted(key, patterns, hits)
        seen = self._seen(key, patterns, hits, invisible.name)
        if seen != key and seen in siblings:
            raise _SameKey
        return self._redacted(seen, patterns, hits)

    def _cleaned(self, text: str, patterns: tuple[Any, ...], hits: _RuleHits) -> str:
        if invisible.suspect(text):
            text = self._seen(text, patterns, hits, invisible.escaped if hits.escape else None)
        return self._redacted(text, patterns, hits)

    def _seen(self, text: str, patterns: tuple[Any, ...], hits: _RuleHits, escaped: Callable[[str], str] | None) -> str:
        """Of a text what its reader sees; what they do not see is counted, and gone or escaped. Where an escape, or a
        joiner that is kept, would hide a secret that the reader could put together again, all of it is gone."""
        visible, controls = invisible.without_controls(text)
        clean, hidden = invisible.without_hidden(visible)
        if controls:
            hits[CONTROL] += controls
        if hidden:
            hits[INVISIBLE] += hidden
        if escaped is not None and (controls or hidden or escaped is invisible.name):
            clean = escaped(text)
        bare = invisible.bare(visible)
        found = self._count_hits(bare, patterns, hits) if clean != bare else 0
        return bare if found and found > self._count_hits(clean, patterns, hits) else clean

    def _count_hits(self, text: str, patterns: tuple[Any, ...], hits: _RuleHits) -> int:
        found = _RuleHits(most=hits.most)
        self._redacted(text, patterns, found)
        hits.found(found.total())  # it was searched for, though nothing of it is gone yet
        return found.total()

    def _redacted(self, text: str, patterns: tuple[Any, ...], hits: _RuleHits) -> str:
        if self.redactor is not None:
            clean, found = self.redactor.marked(text) if hits.judged else self.redactor.redact(text, hits.most)
            if found:
                hits.found(sum(found.values()))
                hits.update(found)
                hits.missing += sum(found.values())
                if hits.judged and hits.missing > _MAX_JUDGED:
                    raise _TooMuchMissing
                if hits.most is None:
                    hits.secrets.update(self.redactor.secrets(text))
                text = clean
        for index, pattern in enumerate(patterns):
            clean, count = _substitute(pattern, text)
            if count:
                hits[f"redact[{index}]"] += count
                text = clean
        return text


def without_forged(value: Any) -> tuple[Any, int]:
    """What a server said without keys of ours in any `_meta` of it, and how many there were. Its depth is bounded."""
    if isinstance(value, dict):
        out: Json = {}
        dropped = 0
        changed = False
        for key, old in value.items():
            new, inside = without_forged(old)
            if key == "_meta" and isinstance(new, dict):
                own = {name: kept for name, kept in new.items() if not looks_ours(name)}
                inside += len(new) - len(own)
                new = own if len(own) != len(new) else new
            changed = changed or new is not old
            dropped += inside
            out[key] = new
        return (out if changed else value), dropped
    if isinstance(value, list):
        pairs = [without_forged(item) for item in value]
        dropped = sum(count for _, count in pairs)
        return ([item for item, _ in pairs] if dropped else value), dropped
    return value, 0


def _texts(value: Any) -> Iterator[str]:
    """All keys, texts and numbers of a value, as a reader may see them. Its depth is bounded."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield _digits(value)


def _digits(number: float) -> str:
    return str(int(number)) if isinstance(number, float) and number.is_integer() else repr(number)


def _size_of(value: Any) -> int:
    try:
        return len(canonical.dumps(value))
    except (ValueError, TypeError, RecursionError):
        raise Refused(Status.FAILED, "bad_output", "it is not plain JSON") from None


def looks_ours(key: str) -> bool:
    """Whether a reader may take this key for one that only the gateway writes, `ringfence/…`: whatever its case, its
    letters' script, and what of it cannot be seen."""
    like = invisible.alike(invisible.without_controls(key)[0]).lstrip()
    after = like.removeprefix(_OURS)
    # Of slashes there are many. A longer name, `ringfence.example/…`, is another's.
    return after != like and not after[:1].isalnum()


def _suspect(encoded: bytes) -> bool:
    # Plain text without an escape, which nearly all is, is recognised at a tenth of the pattern's cost.
    if encoded.isascii() and b"\\" not in encoded and b"\x7f" not in encoded:
        return False
    return _SUSPECT.search(encoded) is not None


def _opaque(key: str, value: Any) -> bool:
    """Words of the protocol, and base64: an operator's pattern would break them. Known secrets still go."""
    if not isinstance(value, str):
        return False
    return (key in _WORDS and len(value) <= 64) or (key in _BASE64 and _IS_BASE64.fullmatch(value) is not None)


def _substitute(pattern: Any, text: str) -> tuple[str, int]:
    parts: list[str] = []
    end = count = 0
    for match in pattern.finditer(text):
        start, stop = match.span()
        if start == stop:
            continue
        count += 1
        if count > _MAX_HITS:
            return REPLACEMENT, count
        parts += (text[end:start], REPLACEMENT)
        end = stop
    return ("".join((*parts, text[end:])), count) if count else (text, 0)


def _free(name: str, taken: Mapping[str, Any], alike: Counter[str]) -> str:
    """Two keys may look alike once cleaned; neither may swallow the other. `alike`: the last number that each had, for
    a search from the first one on would take the square of their number."""
    if name not in taken:
        return name
    number = max(alike[name], 1) + 1
    while f"{name}~{number}" in taken:
        number += 1
    alike[name] = number
    return f"{name}~{number}"


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(re2.compile(pattern) for pattern in patterns)  # checked when the contract was built


# ── Declared fields ───────────────────────────────────────────────────────────────────────────────


ONLY_FIELDS = "The tool failed. Its own words are left out: its contract passes declared fields only."


def _only(result: Json, fields: frozenset[str]) -> Json | None:
    """The result with the declared fields alone; None where there is no object to take them from.

    Whatever else could carry the rest goes too: other blocks, unknown fields, a server's own `_meta`. A text that
    repeats the object is written anew. In place of an error's texts, which may say anything, stands that it failed.
    """
    failed = bool(result.get("isError"))
    blocks = [block for block in result.get("content") or () if isinstance(block, dict) and block.get("type") == "text"]
    structured = result.get("structuredContent")
    kept: Json = {key: result[key] for key in ("isError", "resultType") if key in result}
    objects = (found for found in map(_object, blocks) if found is not None)
    whole = structured if isinstance(structured, dict) else next(objects, None)
    if whole is None and not failed:
        return None
    some = {key: value for key, value in (whole or {}).items() if key in fields}
    if isinstance(structured, dict):
        kept["structuredContent"] = some
    repeated = any(_object(block) == whole for block in blocks)
    kept["content"] = [_text(json.dumps(some, ensure_ascii=False))] if repeated and whole is not None else []
    if failed:
        kept["content"] = [_text(ONLY_FIELDS), *kept["content"]]
    return kept


def _has_content(result: Json) -> bool:
    """Some servers leave `content` out where they have `structuredContent`, and clients take that."""
    if "content" in result:
        return isinstance(result["content"], list)
    return isinstance(result.get("structuredContent"), dict)


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _object(block: Json) -> Json | None:
    text = block.get("text")
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return None
    try:
        value = canonical.loads(text)
    except canonical.NotCanonical:
        return None
    return value if isinstance(value, dict) else None


_OURS = invisible.alike("ringfence")
_LONGEST_KEY = 256


class GuardedChannel:
    """The way back to the client, with everything that a server says on it cleaned as its results are."""

    def __init__(self, guard: Guard, contract: Contract, channel: Channel) -> None:
        self._guard = guard
        self._contract = contract
        self._channel = channel

    @property
    def capabilities(self) -> Json:
        return self._channel.capabilities

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        """Raises Refused where a question cannot be shown as it is."""
        names: dict[str, str] = {}
        clean: dict[str, Json] = {}
        try:
            for key, question in questions.items():
                name = self._name(key, names)
                names[name] = key
                said = await self._guard.said(self._contract, without_forged(question["params"])[0])
                speaker = (question["params"].get("_meta") or {}).get(_SPEAKER)
                if speaker is not None:
                    said = {**said, "_meta": {**(said.get("_meta") or {}), _SPEAKER: speaker}}
                clean[name] = {**question, "params": said}
        except Refused as exc:
            raise Refused(Status.FAILED, "server_question", f"a question of the server: {exc.message}") from None
        return {names[name]: answer for name, answer in (await self._channel.ask(clean)).items() if name in names}

    def _name(self, key: str, taken: Mapping[str, str]) -> str:
        """What the client knows a question by: the server's own key, unless that is more than a name, looks like
        another's, or like one of ours."""
        like = invisible.alike(key[:_LONGEST_KEY])
        free = not like.startswith(_OURS) and all(like != invisible.alike(name) for name in taken)
        if free and len(key) <= _LONGEST_KEY and key in self._guard.redacted(self._contract, {key: None}):
            return key
        return next(name for number in itertools.count(1) if (name := f"question-{number}") not in taken)

    async def notify(self, method: str, params: Json) -> None:
        if method not in SAID_IN_CALLS:
            return
        try:
            clean = await self._guard.said(self._contract, signed(method, params, self._contract.server))
        except Refused as exc:
            log.warning("a server's %s is not passed on: %s", method, exc.message)
            return
        await self._channel.notify(method, clean)


def signed(method: str, params: Json, server: str | None) -> Json:
    """What a server says unasked, without what only we may say. Its log lines begin with its name: a client that hears
    several servers through us knows them apart by it."""
    params = without_forged(params)[0]
    if method != "notifications/message" or server is None:
        return params
    logger = params.get("logger")
    return {**params, "logger": f"{server}/{logger}" if isinstance(logger, str) and logger else server}
