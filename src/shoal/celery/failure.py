"""The error of a failed task."""

from __future__ import annotations


class ScrapeFailed(Exception):
    """A task could not do its work. `error` is an error class, or `usage` for wrong arguments, `export` for a
    file that cannot be written, or `frontier`.

    Its arguments are plain strings, because it is sent back to the process that called the task.
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
