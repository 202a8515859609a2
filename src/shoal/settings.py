"""One table of settings. A value comes from, in this order: a flag or argument, the environment
(`SHOAL_…`, and the names other systems use), `shoal.toml`, `[tool.shoal]` in `pyproject.toml`,
the default here. The reference page is made from this table.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from shoal.addresses import lower_scheme
from shoal.dispatch.routes import DEFAULT_RULES, URL_QUEUE, Ack, Rule
from shoal.errors import UsageError
from shoal.fetch.port import check_headers
from shoal.model import DEFAULT_PRIORITY, JobSpec, Scope
from shoal.politeness.pacing import parse_rate
from shoal.politeness.scope import pattern
from shoal.queues import check_queue

FOREIGN = {
    "request_delay": "REQUEST_DELAY",
    "workers": "MAX_WORKERS",
    "max_pages": "MAX_PAGES",
    "timeout": "REQUEST_TIMEOUT",
    "celery_broker_url": "CELERY_BROKER_URL",
    "celery_result_backend": "CELERY_RESULT_BACKEND",
    "celery_task_rate_limit": "CELERY_TASK_RATE_LIMIT",
    "celery_task_max_retries": "CELERY_TASK_MAX_RETRIES",
    "celery_worker_concurrency": "CELERY_WORKER_CONCURRENCY",
}
"""Variables of other systems that are honoured. `SHOAL_…` wins over them."""

SECRET = ("frontier", "dispatch", "headers", "tokens", "celery_broker_url", "celery_result_backend")
"""Settings whose value is never told: it may hold a password, or a token by mistake."""


def variables(name: str) -> tuple[str, ...]:
    """The environment variables of a setting; the first that is set counts. No others do: `SCOPE` or
    `APP` belong to somebody else."""
    own = f"SHOAL_{name.upper()}"
    return (own, FOREIGN[name]) if name in FOREIGN else (own,)


class _Environment(EnvSettingsSource):
    """The environment by `variables`, and by nothing else."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        own, *foreign = variables(field_name)
        # Compose files and unit files hand on other systems' variables empty: that is not set.
        found = os.environ.get(own, next((said for name in foreign if (said := os.environ.get(name))), None))
        return found, field_name, False


class NamedToken(BaseModel):
    """A token of the API besides that of the owner. Only its SHA-256 is written down."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Literal["read", "submit", "admin"], ...] = ("read",)


class RouteSetting(pydantic.BaseModel):
    """One `[[routes]]`: a pattern, and where URLs like it go."""

    model_config = pydantic.ConfigDict(extra="forbid")

    pattern: str
    queue: str = URL_QUEUE
    priority: int = Field(DEFAULT_PRIORITY, ge=1, le=9)
    ttl: float | None = Field(None, gt=0)
    ack: Ack = "reliable"


class Settings(BaseSettings):
    """Everything that can be set. Safe by default."""

    model_config = SettingsConfigDict(
        toml_file="shoal.toml",
        pyproject_toml_table_header=("tool", "shoal"),
        extra="forbid",
    )

    frontier: str = Field(
        "",
        description="Where requests wait: `sqlite:///path`, `redis://host:port/0`,"
        " `postgresql://user@host/database`, `memory:`.",
    )
    dispatch: str = Field(
        "",
        description="How leases reach workers: `amqp://user:password@host/vhost`; empty: they claim.",
    )
    dispatch_batch: int = Field(
        20,
        ge=1,
        le=1000,
        description="URLs in one message, at most.",
    )
    dispatch_prefetch: int | None = Field(
        None,
        ge=1,
        le=2000,
        description="Messages of a queue that one worker holds; by default enough for twice its visits.",
    )
    routes: Annotated[tuple[RouteSetting, ...] | None, NoDecode] = Field(
        None,
        description="Where URLs go by their pattern: `[[routes]]` with pattern, queue, priority, ttl, ack;"
        " without any the usual rules hold, `[]` turns them off.",
    )
    app: str = Field("", description="Your scrapers: `file.py` or `module:app`.")
    scope: Scope = Field("host", description="How far a crawl goes.")
    rate: str = Field("1/s", description="Visits to one host: `2/s`, `30/m`, `none`.")
    request_delay: float | None = Field(
        None,
        ge=0,
        description="Seconds between two visits to one host, as another way to say `rate`.",
    )
    per_host: int = Field(1, ge=1, description="Visits to one host at a time.")
    concurrency: int = Field(
        16,
        ge=1,
        le=2000,
        description="Visits of one worker at a time, without those that wait for a slow host.",
    )
    workers: int = Field(1, ge=1, le=256, description="Worker processes.")
    max_pages: int = Field(10_000, ge=1, description="Pages of one crawl.")
    max_per_host: int = Field(
        1_000,
        ge=1,
        description="Pages of one crawl on each host that is not a start host.",
    )
    depth: int | None = Field(
        None,
        ge=0,
        description="Links away from the start; 5 beyond scope host.",
    )
    include: Annotated[tuple[str, ...], NoDecode] = Field((), description="Only URLs like these.")
    exclude: Annotated[tuple[str, ...], NoDecode] = Field((), description="No URLs like these.")
    robots: bool = Field(True, description="Obey robots.txt.")
    no_robots: bool = Field(False, description="Do not ask for robots.txt.")
    page_robots: bool = Field(
        False,
        description='Obey `noindex` and `nofollow` in `<meta name="robots">` and `X-Robots-Tag`.',
    )
    allow_private: Annotated[bool | tuple[str, ...], NoDecode] = Field(
        False, description="Allow addresses that are not public: all, or only these `host:port`."
    )
    retries: int = Field(2, ge=0, description="Visits of a URL after the first, when that failed.")
    lease: float = Field(60.0, gt=0, description="Seconds a worker holds a URL.")
    timeout: float = Field(
        60.0,
        gt=0,
        description="Seconds that one fetch may take in all.",
    )
    max_body: int = Field(
        10 * 1024 * 1024,
        ge=1024,
        description="Decoded bytes of one page.",
    )
    cache: float = Field(60.0, ge=0, description="Seconds a response may be served again.")
    user_agent: str = Field("", description="How we introduce ourselves.")
    headers: dict[str, str] = Field({}, description="Sent to the hosts of the start URLs only.")
    fields: Annotated[tuple[str, ...], NoDecode] = Field((), description="Fields of the site item.")
    kinds: Literal["text", "any"] = Field(
        "text",
        description="Kinds of answers that are fetched whole. `text`: what can be read; films, sound,"
        " pictures, fonts and archives are skipped after their head. `any`: all. Scrapers of your own get"
        " all.",
    )
    connect_attempts: int = Field(
        10,
        ge=1,
        le=1000,
        description="How often `worker`, `up`, `run` and `pump` try to reach the frontier's server and the"
        " broker when they start, and `crawl` the broker.",
    )
    give_up_after: float | None = Field(
        None,
        ge=0,
        description="Seconds that a worker waits for a frontier that fails (full disk, server away) before it"
        " ends with the error; 0 means without end. Default: 60 seconds for `crawl`, `run` and crawls in"
        " Python, without end for `worker`, `up` and `serve`.",
    )
    log_level: Literal["debug", "info", "warning", "error"] | None = Field(
        None,
        description="Lowest level that commands log: `debug`, `info`, `warning` or `error`. Default: `info`;"
        " `warning` for `crawl` and `run`; `error` with `--quiet`.",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="Format of the log of commands: `text`, or `json` with one object per line.",
    )
    http2: bool = Field(False, description="Speak HTTP/2 where TLS offers it.")
    host: str = Field(
        "127.0.0.1",
        description="Where `shoal serve` listens. Any other address than loopback needs a token.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Its port; 0 takes a free one.")
    token_file: str = Field(
        ".shoal/token",
        description="The owner's API token: made at the first start, for its owner's eyes only. Empty: none.",
    )
    tokens: tuple[NamedToken, ...] = Field(
        (),
        description="More API tokens: `name`, `sha256` of the token, `scopes` (read, submit, admin).",
    )
    require_token: bool = Field(False, description="Ask for a token on loopback as well.")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Names under which the API may be called, besides loopback; behind a proxy its name.",
    )
    api_rate: str = Field(
        "1000/s",
        description="API requests of one token, or of one address without a token. `5/m` lets 5 through"
        " at once, then one every 12 seconds.",
    )
    max_request: int = Field(
        10 * 1024 * 1024,
        ge=1024,
        description="Bytes of one API request.",
    )
    health_max_pending: int = Field(
        10_000,
        ge=0,
        description="`/health` is bad when more URLs than this wait.",
    )
    health_max_failed: float = Field(
        0.1,
        ge=0,
        description="`/health` is bad when more URLs than this part of the completed ones failed.",
    )
    health_min_finished: int = Field(
        100,
        ge=1,
        description="`/health` does not judge how many URLs failed before so many have ended.",
    )
    celery_broker_url: str = Field(
        "redis://localhost:6379/0",
        description="The broker of Celery workers.",
    )
    celery_result_backend: str = Field(
        "",
        description="Where Celery keeps results; by default the next database of a Redis broker.",
    )
    celery_task_rate_limit: str = Field(
        "10/m",
        pattern=r"^(none|\d+(/[smh])?)$",
        description="How often a Celery worker begins one of the public tasks; when set, a visit too.",
    )
    celery_task_max_retries: int = Field(
        3,
        ge=0,
        description="How often a Celery task is tried again.",
    )
    celery_worker_concurrency: int = Field(
        2,
        ge=1,
        le=256,
        description="Tasks of one Celery worker at a time.",
    )
    celery_batch: int = Field(
        1,
        ge=1,
        le=100,
        description="URLs in one Celery task. With 1, Flower shows every URL; more is faster.",
    )

    @field_validator("routes", mode="before")
    @classmethod
    def _rules_given(cls, value: Any) -> Any:
        """A text is JSON: the environment has nothing else."""
        said = isinstance(value, str)
        if said:
            value = _json(value) if value.strip() else None
        if value is None or (
            isinstance(value, list | tuple) and all(isinstance(rule, dict | RouteSetting) for rule in value)
        ):
            return value
        if said:
            raise UsageError(
                "SHOAL_ROUTES is no JSON list of rules",
                hint="""write SHOAL_ROUTES='[{"pattern": "*/news/*", "queue": "priority_queue"}]'""",
            )
        raise UsageError("routes is no list of rules", hint="in shoal.toml each one begins with [[routes]]")

    @field_validator("routes")
    @classmethod
    def _routes(cls, value: tuple[RouteSetting, ...] | None) -> tuple[RouteSetting, ...] | None:
        for rule in value or ():
            pattern(rule.pattern)
            check_queue(rule.queue)
        return value

    @field_validator("frontier", "dispatch")
    @classmethod
    def _address(cls, value: str) -> str:
        return lower_scheme(value)

    @field_validator("rate", "api_rate")
    @classmethod
    def _rate(cls, value: str) -> str:
        parse_rate(value)
        return value

    @field_validator("include", "exclude", "fields", "allowed_hosts", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """`a,b` in the environment or a flag is a list of two."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("allow_private", mode="before")
    @classmethod
    def _private(cls, value: Any) -> Any:
        """What holds a colon is a list of endpoints; all else is yes or no."""
        return cls._listed(value) if isinstance(value, str) and ":" in value else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (
            init_settings,
            _Environment(settings_cls),
            TomlConfigSettingsSource(settings_cls),
            PyprojectTomlConfigSettingsSource(settings_cls),
        )

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The routes that count: those that were set, even if none, or the usual ones."""
        if self.routes is None:
            return DEFAULT_RULES
        return tuple(Rule(**rule.model_dump()) for rule in self.routes)

    @property
    def log_variables(self) -> dict[str, str]:
        """Environment variables that make a child process log like this one."""
        return {"SHOAL_LOG_LEVEL": self.log_level or "info", "SHOAL_LOG_FORMAT": self.log_format}

    @property
    def celery_named(self) -> bool:
        """Whether somebody named the broker of Celery workers: then they are the ones who visit."""
        return "celery_broker_url" in self.model_fields_set

    @property
    def celery_frontier(self) -> str:
        """Where Celery workers find the frontier: where it is said to be, else on a Redis broker."""
        if self.frontier:
            return self.frontier
        parts = urlsplit(self.celery_broker_url)
        if parts.scheme not in ("redis", "rediss"):
            return ""
        # Options after `?` are Celery's own.
        return parts._replace(query="", fragment="").geturl()

    @property
    def prefetch(self) -> int:
        """Messages that one worker holds of each queue: the next ones wait beside those under way."""
        return self.dispatch_prefetch or max(2, -(-2 * self.concurrency // self.dispatch_batch))

    @property
    def gap(self) -> float:
        """Seconds between two visits to one host."""
        if self.request_delay is not None and "rate" not in self.model_fields_set:
            return self.request_delay
        return parse_rate(self.rate)

    def spec(self, start: tuple[str, ...], **more: Any) -> JobSpec:
        """What a crawl with these settings is asked to do."""
        values: dict[str, Any] = {
            "start": start,
            "scope": self.scope,
            "include": self.include,
            "exclude": self.exclude,
            "depth": self.depth,
            "max_pages": self.max_pages,
            "max_per_host": self.max_per_host,
            "gap": self.gap,
            "width": self.per_host,
            "robots": self.robots and not self.no_robots,
            "page_robots": self.page_robots,
            "allow_private": self.allow_private,
            "retries": self.retries,
            "lease": self.lease,
            "headers": dict(self.headers) or None,
            "fields": self.fields,
            "kinds": self.kinds,
            "cache": self.cache,
            "max_body": self.max_body,
            "timeout": self.timeout,
        }
        spec = JobSpec(**(values | more))
        check_headers(spec.headers or ())
        return spec

    def respec(self, earlier: JobSpec) -> JobSpec:
        """What a crawl that goes on is asked to do: what it was asked before, and on top of it what was
        given now. A default is not given."""
        now = self.spec(earlier.start)
        names = {"gap": {"rate", "request_delay"}, "width": {"per_host"}, "robots": {"robots", "no_robots"}}
        changed = {
            field: getattr(now, field)
            for field in JobSpec.__struct_fields__
            if names.get(field, {field}) & self.model_fields_set
        }
        return msgspec.structs.replace(earlier, **changed)


def _json(text: str) -> Any:
    """What a text says as JSON; the text itself if it is none."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def load(**given: Any) -> Settings:
    """The settings with what was given on top. None means not given. Raises UsageError."""
    known(given)
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        name = ".".join(place) or "settings"
        if first["type"] == "extra_forbidden":
            if len(place) == 1:
                raise _unknown(name, _file_of(name)) from None
            raise UsageError(f"there is no {name}", hint="see the reference page of settings") from None
        said = first["msg"].removeprefix("Value error, ")
        shown = "" if place and place[0] in SECRET else f" = {first.get('input')!r}"
        raise UsageError(f"{name}{shown}: {said}", hint="see --help for what it takes") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the settings: {error}", hint=f"check {Path('shoal.toml')}") from None


def known(given: Iterable[str]) -> None:
    """Refuse names that are no settings: a misspelt one would be ignored in silence."""
    for name in given:
        if name not in Settings.model_fields:
            raise _unknown(name)


def _unknown(name: str, file: str = "") -> UsageError:
    near = get_close_matches(name.lower(), Settings.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "the reference page of settings lists them all"
    where = f"{file}: " if file else ""
    return UsageError(f"{where}there is no setting {name!r}", hint=hint)


def _file_of(name: str) -> str:
    in_toml = name in TomlConfigSettingsSource(Settings)()
    return "shoal.toml" if in_toml else "[tool.shoal] of pyproject.toml"
