"""What a person is told when their configuration is written."""

from __future__ import annotations

from pathlib import Path

from ringfence.cli.init.pasting import pasted
from ringfence.cli.init.planning import Plan
from ringfence.cli.init.taking import Taken
from ringfence.cli.terminal import safe
from ringfence.errors import Unavailable


def tell(taken: Taken, output: Path) -> None:
    tools = sum(1 for found in taken.definitions.values() for each in found if each.kind == "tool")
    started = [plan.name for plan in taken.kept if plan.name in taken.definitions]
    print()
    print(safe(f"Wrote {output}: {_count(len(taken.kept), 'server')}, {_count(tools, 'tool')}."))
    for plan in taken.plans:
        if plan.problem is not None:
            print(safe(f"  {plan.server.name} is left out: {plan.problem}"))
        elif plan.name not in started:
            print(safe(f"  {plan.name} did not start{_next(plan)}"))
    kept = {plan.name for plan in taken.kept}
    secrets = [asked for asked in taken.secrets if kept & set(asked.servers)]
    for asked in secrets:
        print(safe(f"  The secret {asked.name} is taken from the variable {asked.variable}, when Ringfence starts."))
    print(f"\nPut this into {safe(taken.file.path.name)} instead of those servers:\n")
    print(pasted(taken.file, secrets, output))


def _next(plan: Plan) -> str:
    """A server without its secret lacks nothing that its box could have."""
    if isinstance(plan.failure, Unavailable) and plan.failure.reason_code == "no_secret":
        return f": {plan.failure}. Set it, and run this again"
    return f"; see what it lacks: ringfence init --learn {plan.name}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
