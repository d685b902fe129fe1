"""What `make run` serves: an example server and contracts for its tools."""
