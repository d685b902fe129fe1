"""`ringfence box`: sandboxes from a shell."""
