"""Boxes with an agent of ours as their first process: containers and virtual machines, one like the other."""
