"""Protocol in, Call out; Outcome in, protocol out."""
