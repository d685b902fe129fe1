"""The composition root: the only place that names implementations and puts them together."""
