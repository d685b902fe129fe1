"""Limits that the kernel does not hold by itself: when a box is looked at, and what is counted."""
