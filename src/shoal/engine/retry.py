"""Makes a verdict of an error and an attempt: one pure function, so that all failures are treated alike."""

from __future__ import annotations

from shoal import errors, model
from shoal.errors import FetchError, class_of
from shoal.model import Dead, Failure, Lease
from shoal.politeness.pacing import backoff

MESSAGE_LIMIT = 500


def failure_of(error: BaseException) -> Failure:
    """Returns what went wrong, as an error class and a sentence. Never raises, whatever the error is."""
    if isinstance(error, FetchError):
        # A dead letter has no field for a hint.
        message = f"{error.message} ({error.hint})" if error.hint else error.message
        return Failure(error.error, message[:MESSAGE_LIMIT])
    if isinstance(error, errors.BadUrl):
        return Failure(error.error, str(error)[:MESSAGE_LIMIT])
    if isinstance(error, errors.Retry):
        return Failure("handler_retry", error.reason[:MESSAGE_LIMIT])
    return Failure("handler_error", f"{type(error).__name__}: {error}"[:MESSAGE_LIMIT])


def verdict_for(
    lease: Lease, failure: Failure, *, max_attempts: int, after: float | None, jitter: float
) -> model.Retry | Dead:
    """Returns Retry or Dead, by the class of the failure and by how often the request has failed.

    `max_attempts` visits may fail in all. `after` is the wait that the server or the handler asked for.
    `jitter`, a random number between 0 and 1, spreads the retries of many requests.
    """
    failed = lease.request.attempt + 1
    if failed >= max_attempts or not class_of(failure.error).retry:
        return Dead(lease, failure)
    wait = after if after is not None else backoff(failed, jitter=jitter)
    return model.Retry(lease, wait, failure)


def rest_for(failure: Failure, *, attempt: int, after: float | None) -> float | None:
    """Returns the seconds that the whole lane should rest after this failure; None if it need not."""
    if not class_of(failure.error).slows:
        return None
    return after if after is not None else backoff(attempt + 1, base=5.0, cap=300.0, jitter=1.0)
