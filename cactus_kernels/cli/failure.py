"""How the command says what is wrong."""


class Failure(Exception):
    """Ends the command with one line on stderr and an exit code: 2 for bad arguments, 1 for a failure while running."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code
