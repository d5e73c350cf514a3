"""The compiled extension: importing it registers the ops, and it has no names of its own."""
