"""What other programs are told of calls that ended. `docs/hooks.md` says how to use it."""
