"""What the command returns, beside 0."""

EXIT_DIFFERENT = 1  # plain and speculative output differ by more than rounding, or another check of verify failed
EXIT_USAGE = 2
EXIT_REFUSED = 3  # bad input, or an unfit machine
EXIT_INTERRUPTED = 130
