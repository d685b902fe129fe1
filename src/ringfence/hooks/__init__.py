"""Delivery of the records of calls that ended to other programs. `docs/hooks.md` says how to use it."""
