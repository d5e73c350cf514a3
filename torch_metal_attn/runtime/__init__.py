"""The compiled extension, the shaders' text, the machine's devices, and the errors of ops."""
