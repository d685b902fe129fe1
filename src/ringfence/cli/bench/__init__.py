"""`ringfence bench`: measured on this machine, interleaved with its baseline, printed as ratios."""
