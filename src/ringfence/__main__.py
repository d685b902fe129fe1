"""`python -m ringfence`, where the program `ringfence` is not on the path."""

from __future__ import annotations

from ringfence.cli.main import main

main()
