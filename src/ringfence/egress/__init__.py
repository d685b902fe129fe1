"""The way out of a box: one listener per box, rules for what it may reach, and a record of all that was asked."""
