"""Boxes: what executes does so in one of these."""
