"""Helpers of the public functions: arguments, autocast and the random numbers of dropout."""
