"""Hostile cases: what a box promises, tried on this host."""

from ringfence.doctor.case import CLASSES, Case, CaseResult, SuiteReport
from ringfence.doctor.cases import CATALOGUE
from ringfence.doctor.suite import Options, run

__all__ = ["CATALOGUE", "CLASSES", "Case", "CaseResult", "Options", "SuiteReport", "run"]
