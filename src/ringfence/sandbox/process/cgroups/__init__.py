"""Control groups of boxes."""
