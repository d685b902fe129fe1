"""The `ringfence` command. Thin: it reads arguments, calls what lies below, prints, and exits."""
