"""What runs inside install boxes."""
