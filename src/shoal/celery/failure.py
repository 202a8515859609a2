"""How a task fails."""

from __future__ import annotations


class ScrapeFailed(Exception):
    """A task that could not do what it was asked for. `error` is a class of failure, `usage` for a
    task that was asked wrongly, `export` for a file that cannot be written, or `frontier`.

    Its arguments are plain texts: it crosses processes, and comes back to who asked.
    """

    def __init__(self, error: str, message: str = "", url: str = "") -> None:
        super().__init__(error, message, url)
        self.error = error
        self.message = message
        self.url = url

    def __str__(self) -> str:
        return " ".join(part for part in (f"{self.error}:", self.message, self.url) if part)

    @property
    def document(self) -> dict[str, str]:
        return {"url": self.url, "error": self.error, "message": self.message}
