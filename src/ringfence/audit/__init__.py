"""Evidence: the chain, the key that signs it, exports, and what a record says in sentences."""
