"""`ringfence host`: what this host gives to boxes, what is missing, why, and what to do about it."""
