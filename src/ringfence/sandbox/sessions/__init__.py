"""Sessions: boxes that stay, with their interpreters, background commands, ports, snapshots and volumes."""
