"""Logs of a verb: on stderr, warnings alone unless more is asked for."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(*, verbose: bool = False) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
