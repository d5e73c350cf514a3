"""The table of measured tiles: how it is read and used, and what it says about torch's speed."""
