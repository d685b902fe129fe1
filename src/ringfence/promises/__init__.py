"""Hostile cases: what a box promises, tried on this host."""

from ringfence.promises.case import CLASSES, Case, Report, Result
from ringfence.promises.cases import CATALOGUE
from ringfence.promises.suite import Options, run

__all__ = ["CATALOGUE", "CLASSES", "Case", "Options", "Report", "Result", "run"]
