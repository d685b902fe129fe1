"""The keeper: a process that holds a user's sessions, its clients, and the protocol between them."""
