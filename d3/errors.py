"""Errors a user can act on: what went wrong, what to do, and the exit code."""


class D3Error(Exception):
    """A failure with its remedy; command lines print it as one line and exit with `code` (2: wrong use or input)."""

    def __init__(self, message: str, remedy: str = "", code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.code = code

    def __reduce__(self) -> tuple[type["D3Error"], tuple[str, str, int]]:
        """Keep the remedy when an error crosses a process boundary (launchers pickle exceptions)."""
        return type(self), (self.message, self.remedy, self.code)

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message
