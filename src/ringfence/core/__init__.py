"""What every layer may hold: the nouns of calls, contracts, boxes and sessions, errors, ports, and pure helpers."""
