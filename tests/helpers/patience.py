"""How long tests wait for what must come.

It ends a test that would wait for ever, and nothing else: no machine is too slow for it.
"""

HANG_SECONDS = 600
