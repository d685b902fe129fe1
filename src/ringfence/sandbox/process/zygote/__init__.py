"""What runs in the zygote, and in a box before its program does. Standard library only."""
