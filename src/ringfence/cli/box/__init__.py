"""`ringfence box`: sessions, which are boxes that stay, from a shell."""
