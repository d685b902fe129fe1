"""What runs inside a box: the runner of programs, the interpreter of sessions, and what shows values."""
