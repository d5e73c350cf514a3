"""The compiled extension, the shaders' text, what this machine can run, and refusals."""
