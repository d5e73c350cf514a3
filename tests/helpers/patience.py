"""The time after which a test that hangs is ended. It is ample for slow machines."""

HANG_SECONDS = 600
