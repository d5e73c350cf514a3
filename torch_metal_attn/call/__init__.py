"""What the public functions share: their arguments, autocast and the random numbers of dropout."""
