"""Where secrets come from, and how they are found and removed in whatever leaves."""
