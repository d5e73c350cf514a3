"""`tune`: measures tiles, and writes tables of the fastest."""
