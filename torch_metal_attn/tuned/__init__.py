"""The table of measured tiles: reads it, applies it, and compares torch's speed with ours."""
