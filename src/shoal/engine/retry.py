"""From error and attempt to verdict: one pure function, so that every failure is treated alike."""

from __future__ import annotations

from shoal import errors, model
from shoal.errors import FetchError, class_of
from shoal.model import Dead, Failure, Lease
from shoal.politeness.pacing import backoff

MESSAGE_LIMIT = 500


def failure_of(error: BaseException) -> Failure:
    """What went wrong, as a class and a sentence. Never raises, whatever was raised."""
    if isinstance(error, FetchError):
        # A dead letter has no place for a hint of its own.
        told = f"{error.message} ({error.hint})" if error.hint else error.message
        return Failure(error.error, told[:MESSAGE_LIMIT])
    if isinstance(error, errors.BadUrl):
        return Failure(error.error, str(error)[:MESSAGE_LIMIT])
    if isinstance(error, errors.Retry):
        return Failure("handler_retry", error.reason[:MESSAGE_LIMIT])
    return Failure("handler_error", f"{type(error).__name__}: {error}"[:MESSAGE_LIMIT])


def verdict_for(
    lease: Lease, failure: Failure, *, max_attempts: int, after: float | None, jitter: float
) -> model.Retry | Dead:
    """Try again, or dead: by the class of the failure and how often the request failed before.

    `max_attempts` visits may fail in all; `after` is what the server or the handler asked for;
    `jitter` between 0 and 1 spreads the herd.
    """
    failed = lease.request.attempt + 1
    if failed >= max_attempts or not class_of(failure.error).retry:
        return Dead(lease, failure)
    wait = after if after is not None else backoff(failed, jitter=jitter)
    return model.Retry(lease, wait, failure)


def rest_for(failure: Failure, *, attempt: int, after: float | None) -> float | None:
    """Seconds that the whole lane should rest after this failure; None when it need not."""
    if not class_of(failure.error).slows:
        return None
    return after if after is not None else backoff(attempt + 1, base=5.0, cap=300.0, jitter=1.0)
