"""The log as lines of JSON, each with the call that it is about, for programs that read logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from ringfence.core.model import Json
from ringfence.telemetry.watch import log, under_way


class JsonLines(logging.Formatter):
    """One object for each record. Its text was cleaned by the filter of its handler, as all that is logged."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: Json = {
            "at": at.removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        watch = getattr(record, "watch", None) or under_way()
        if watch is not None:
            line |= {"call_id": watch.call_id, "trace_id": watch.trace_id}
        line |= getattr(record, "told", {})
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["exception"] = record.exc_text
        return json.dumps(line, ensure_ascii=False)


def log_as_json() -> None:
    """From now on the log of this process is lines of JSON, one for each call among them."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines())
    log.setLevel(logging.INFO)
