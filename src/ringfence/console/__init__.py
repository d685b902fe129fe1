"""The console at `/console`: pages for people, made on the server, live by events."""
