"""Guests: other kernels, machines and set-ups, booted under QEMU from the distribution's packages, to try it in."""
