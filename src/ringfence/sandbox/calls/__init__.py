"""How each tool of sessions is carried out, once it was granted."""
