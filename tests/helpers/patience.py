"""How long tests wait: it ends a test that would wait forever, and no machine is too slow."""

HANG_SECONDS = 600
