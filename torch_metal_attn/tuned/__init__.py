"""Tables of measured tiles: their format, how they are found and loaded, and what they advise."""
