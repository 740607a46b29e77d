"""What can go wrong."""


class EmulatorUnavailable(RuntimeError):
    """The interpreter cannot be built here; the message says why. Tests skip with it as the reason."""


class EmulationError(RuntimeError):
    """The program cannot be encoded, or did something wrong; the message has the instruction and its source line."""
