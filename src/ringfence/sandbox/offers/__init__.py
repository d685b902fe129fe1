"""What each tool of sessions takes, gives back, and says of itself."""
