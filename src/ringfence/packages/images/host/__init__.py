"""A root file system out of what this host has: its interpreter, libraries, packages and programs."""
