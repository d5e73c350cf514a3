"""Flex attention: scores and masks written in Python, traced and compiled into the kernels."""
