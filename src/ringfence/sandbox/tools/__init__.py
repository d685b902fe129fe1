"""Our own tools: what they take and say of themselves, and how a granted call of one is carried out."""
