"""System calls: which a box may make, the filter that says so, and what becomes of those it was refused."""
