"""System calls: which a box may make, the filter that enforces it, and how refused calls are answered and counted."""
