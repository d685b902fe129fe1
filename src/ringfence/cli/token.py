"""`ringfence token`: bearer tokens, by which callers prove which agent or person they are."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import typer

from ringfence import config, identity
from ringfence.audit.keys import published
from ringfence.cli import common
from ringfence.cli.terminal import moment, safe
from ringfence.config import Config
from ringfence.core.errors import StoreError
from ringfence.core.model import IssuedToken, Json
from ringfence.identity.tokens import MAX_SECONDS, MIN_SECONDS, TOKEN_ID, USUAL_SECONDS
from ringfence.store import Reader

token = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@token.callback()
def group() -> None:
    """Create, list and revoke bearer tokens. A gateway knows of each only a digest.

    \b
    ringfence token create --agent analyst      prints a new token, once
    ringfence token list                        whose there are, and until when
    ringfence token revoke tok_1f               the beginning of an id is enough
    """


@token.command()
def create(
    agent: str | None = typer.Option(None, "--agent", metavar="A", help="The agent, of those under agents:."),
    person: str | None = typer.Option(None, "--person", metavar="P", help="The person, of those under people:."),
    expires: int = typer.Option(
        USUAL_SECONDS,
        "--expires",
        metavar="SECONDS",
        min=MIN_SECONDS,
        max=MAX_SECONDS,
        help="How long it is valid; 30 days unless given, 366 days at most.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object: token, id, and whose it is until when."),
    config_path: Path | None = common.ConfigOption,
) -> None:
    """Create a token for one agent or one person, and print it: it is not shown again.

    A running gateway accepts it at once. It is all that a caller needs to be that agent: treat it like a password.

    \b
    ringfence token create --agent analyst
    ringfence token create --agent analyst --expires 3600 --json
    """
    if (agent is None) == (person is None):
        common.fail("whose is it? Give --agent or --person, one of them", 2)
    settings = common.load(config_path)
    tenant = _tenant_of(settings, agent, person)
    ident, text, digest = identity.new_token()
    now = time.time()
    made = IssuedToken(
        id=ident,
        digest=digest,
        kind="person" if agent is None else "agent",
        name=agent or person or "",
        tenant=tenant,
        made_by=identity.os_user(),
        made_at=now,
        expires_at=now + expires,
    )
    with common.writing(settings.gateway.state) as store:
        store.write_sync(lambda tx: tx.put_token(made))
    if as_json:
        common.dump({"token": text, **_as_json(made, now)})
        return
    print(text)
    print(f"{_line(made, now)}\nIt is not shown again. Send it as: Authorization: Bearer TOKEN", file=sys.stderr)


def _tenant_of(settings: Config, agent: str | None, person: str | None) -> str:
    kind, name, known = ("agent", agent, settings.agents) if agent is not None else ("person", person, settings.people)
    found = known.get(name or "")
    if found is None:
        section = "agents" if kind == "agent" else "people"
        there = f"it has {', '.join(known)}" if known else f"write {section}: {{{name}: …}} there"
        common.fail(f"{settings.path} declares no {kind} {name}: {there}")
    return found.tenant


@token.command("list")
def list_(
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list."),
    config_path: Path | None = common.ConfigOption,
) -> None:
    """List all tokens, the oldest first: whose each is, and whether it is valid. None is shown itself."""
    now = time.time()
    with common.reading(common.state_of(config_path, demo=False)) as reader:
        found = _tokens(reader)
    if as_json:
        common.dump([_as_json(each, now) for each in found])
    elif not found:
        print("There are no tokens. Create one: ringfence token create --agent NAME")
    for each in found if not as_json else ():
        print(_line(each, now))


@token.command()
def revoke(
    identifier: str = typer.Argument(..., metavar="ID", help="Its id, or the beginning of it."),
    config_path: Path | None = common.ConfigOption,
) -> None:
    """Revoke a token. Running gateways refuse it within a second, and end what it is being used for.

    \b
    ringfence token revoke tok_0123456789abcdef0123
    """
    folder = common.state_of(config_path, demo=False)
    with common.reading(folder) as reader:
        ident = _find(reader, identifier)
    with common.writing(folder) as store:
        try:
            gone = store.write_sync(lambda tx: tx.revoke_token(ident, identity.os_user(), time.time()))
        except StoreError as exc:
            common.fail(str(exc))
    print(f"{gone.id}: revoked. It was for {gone.kind} {safe(gone.name)}.")


def _tokens(reader: Reader) -> list[IssuedToken]:
    return reader.tokens(reader.token_proofs(published(config.key_folder())))


def _find(reader: Reader, identifier: str) -> str:
    wanted = identifier if identifier.startswith(TOKEN_ID) else TOKEN_ID + identifier
    found = [each.id for each in _tokens(reader) if each.id.startswith(wanted)]
    if len(found) > 1:
        common.fail(f"{safe(identifier)} could be any of: {', '.join(found)}")
    if not found:
        common.fail(f"there is no token {safe(identifier)}; see: ringfence token list")
    return found[0]


def _line(each: IssuedToken, now: float) -> str:
    state = each.state(now)
    until = f"until {moment(each.expires_at)}" if state == "valid" else state
    return safe(f"{each.id}  {each.kind} {each.name}, tenant {each.tenant}; {until}; made {moment(each.made_at)}")


def _as_json(each: IssuedToken, now: float) -> Json:
    return {
        "id": each.id,
        each.kind: each.name,
        "tenant": each.tenant,
        "state": each.state(now),
        "made_by": each.made_by,
        "made_at": each.made_at,
        "expires_at": each.expires_at,
        "revoked_at": each.revoked_at,
    }
