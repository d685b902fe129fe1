"""What became of a block of Python in an interpreter that keeps its state."""

from __future__ import annotations

from ringfence.model import Json, Outcome, Status
from ringfence.sdk.execution import Execution, ExecutionError, Logs, stopped_by, streams
from ringfence.sdk.result import Result


def cell(outcome: Outcome) -> Execution:
    """Raises what says that nothing ran, or that nobody knows."""
    stdout, stderr = streams(outcome)
    told = outcome.structured if isinstance(outcome.structured, dict) else {}
    claimed = told.get("claimed") or {}
    return Execution(
        logs=Logs([stdout] if stdout else [], [stderr] if stderr else []),
        error=_error(outcome, told, claimed),
        facts=outcome.facts,
        status=str(outcome.status),
        results=[Result.of(each) for each in claimed.get("results") or ()],
        context=told.get("context"),
        step=told.get("step"),
        alive=bool(told.get("interpreter_alive", True)),
    )


def _error(outcome: Outcome, told: Json, claimed: Json) -> ExecutionError | None:
    if outcome.status is Status.SUCCESS:
        return None
    said = claimed.get("error")
    if outcome.status is Status.FAILED and said:
        return ExecutionError(str(said["name"]), str(said["value"]), str(said.get("traceback") or ""))
    if (stopped := stopped_by(outcome)) is not None:
        return stopped
    if told.get("interpreter_alive", True):
        return ExecutionError("SystemExit", str(outcome.facts.get("exit_status")))
    how = f"the interpreter ended with status {outcome.facts.get('exit_status')}"
    return ExecutionError("InterpreterEnded", f"{how}; its variables are gone, and the next run has a fresh one")
