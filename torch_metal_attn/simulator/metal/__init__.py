"""Metal text to C++ for the host: tokens, and what is rewritten."""
