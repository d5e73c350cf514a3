"""Tables of measured tiles: their format, and how they are found and loaded."""
