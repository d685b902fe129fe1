"""Packages of npm and PyPI, fetched once in a box, pinned by what their registry says of their bytes, and kept."""
