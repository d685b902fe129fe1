"""The embedded Linux backend: namespaces, Landlock, seccomp and cgroups, in Python alone."""
