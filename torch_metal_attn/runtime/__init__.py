"""The compiled extension, the shaders' text, and what this machine and its GPU can run."""
