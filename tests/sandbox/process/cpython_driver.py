"""Runs one module of CPython's own tests, bare or in a box: `python cpython_driver.py MODULE`.

Writes a line `test id TAB outcome TAB why` for each test into output/results. The file is opened anew for every line:
what is tested here forks, closes descriptors and dies.
"""

from __future__ import annotations

import os
import sys
import unittest

RESULTS = os.path.abspath("output/results")


def say(test: str, outcome: str, why: str = "") -> None:
    line = f"{test}\t{outcome}\t{' '.join(why.split())[-200:]}\n"
    descriptor = os.open(RESULTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.write(descriptor, line.encode("utf-8", "replace"))
    os.close(descriptor)


class Result(unittest.TestResult):
    """The worst of a test's own outcome and those of its parts counts."""

    outcome = ("ok", "")

    def startTest(self, test):
        super().startTest(test)
        self.outcome = ("ok", "")
        say(test.id(), "hung")

    def stopTest(self, test):
        super().stopTest(test)
        say(test.id(), *self.outcome)

    def _note(self, test, outcome, why):
        if not isinstance(test, unittest.TestCase):  # what is set up for a class or a module
            say(test.id(), outcome, why)
        elif self.outcome[0] in ("ok", "skipped"):
            self.outcome = (outcome, why)

    def addError(self, test, err):
        self._note(test, "failed", f"{err[0].__name__}: {err[1]}")

    addFailure = addError

    def addSkip(self, test, reason):
        self._note(test, "skipped", reason)

    def addExpectedFailure(self, test, err):
        pass

    def addUnexpectedSuccess(self, test):
        self._note(test, "failed", "unexpected success")

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.addError(test, err)


def main() -> None:
    from test import support  # type: ignore[import-not-found]

    support.use_resources = []  # nothing that needs the network, a terminal, or minutes
    place = os.path.join(os.environ["TMPDIR"], "cwd")
    os.mkdir(place)
    os.chdir(place)
    try:
        suite = unittest.defaultTestLoader.loadTestsFromName(f"test.{sys.argv[1]}")
    except unittest.SkipTest as exc:
        say(sys.argv[1], "skipped", str(exc))
    else:
        suite.run(Result())
    say("the end", "ok")


if __name__ == "__main__":
    main()
