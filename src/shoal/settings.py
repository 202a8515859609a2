"""One table of settings. A value comes from, in this order: a flag or argument, the environment
(`SHOAL_…`, and the names other systems use), `shoal.toml`, `[tool.shoal]` in `pyproject.toml`,
the default here. The reference page is made from this table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pydantic
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from shoal.dispatch.routes import DEFAULT_RULES, URL_QUEUE, Ack, Rule
from shoal.errors import UsageError
from shoal.model import DEFAULT_PRIORITY, JobSpec, Scope
from shoal.politeness.pacing import parse_rate
from shoal.politeness.scope import pattern


def _named(name: str, *others: str) -> AliasChoices:
    """The names under which a setting is found: its own, SHOAL_…, and those of other systems."""
    return AliasChoices(name, f"SHOAL_{name.upper()}", *others)


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
    queue: str = Field(URL_QUEUE, min_length=1, max_length=100)
    priority: int = Field(DEFAULT_PRIORITY, ge=1, le=9)
    ttl: float | None = Field(None, gt=0)
    ack: Ack = "reliable"


class Settings(BaseSettings):
    """Everything that can be set. Safe by default."""

    model_config = SettingsConfigDict(
        toml_file="shoal.toml",
        pyproject_toml_table_header=("tool", "shoal"),
        extra="ignore",
        populate_by_name=True,
    )

    frontier: str = Field(
        "",
        validation_alias=_named("frontier"),
        description="Where requests wait: `sqlite:///path`, `redis://host:port/0`, `memory:`.",
    )
    dispatch: str = Field(
        "",
        validation_alias=_named("dispatch"),
        description="How leases reach workers: `amqp://user:password@host/vhost`; empty: they claim.",
    )
    dispatch_batch: int = Field(
        20,
        validation_alias=_named("dispatch_batch"),
        ge=1,
        le=1000,
        description="URLs in one message, at most.",
    )
    dispatch_prefetch: int | None = Field(
        None,
        validation_alias=_named("dispatch_prefetch"),
        ge=1,
        le=2000,
        description="Messages of a queue that one worker holds; by default enough for twice its visits.",
    )
    routes: tuple[RouteSetting, ...] = Field(
        (),
        validation_alias=_named("routes"),
        description="Where URLs go by their pattern: `[[routes]]` with pattern, queue, priority, ttl, ack.",
    )
    app: str = Field(
        "", validation_alias=_named("app"), description="Your scrapers: `file.py` or `module:app`."
    )
    scope: Scope = Field("host", validation_alias=_named("scope"), description="How far a crawl goes.")
    rate: str = Field(
        "1/s", validation_alias=_named("rate"), description="Visits to one host: `2/s`, `30/m`, `none`."
    )
    request_delay: float | None = Field(
        None,
        validation_alias=_named("request_delay", "REQUEST_DELAY"),
        ge=0,
        description="Seconds between two visits to one host, as another way to say `rate`.",
    )
    per_host: int = Field(
        1, validation_alias=_named("per_host"), ge=1, description="Visits to one host at a time."
    )
    concurrency: int = Field(
        16,
        validation_alias=_named("concurrency"),
        ge=1,
        le=2000,
        description="Visits of one worker at a time.",
    )
    workers: int = Field(
        1, validation_alias=_named("workers", "MAX_WORKERS"), ge=1, le=256, description="Worker processes."
    )
    max_pages: int = Field(
        10_000, validation_alias=_named("max_pages", "MAX_PAGES"), ge=1, description="Pages of one crawl."
    )
    max_per_host: int = Field(
        1_000,
        validation_alias=_named("max_per_host"),
        ge=1,
        description="Pages of one crawl on each host that is not a start host.",
    )
    depth: int | None = Field(
        None,
        validation_alias=_named("depth"),
        ge=0,
        description="Links away from the start; 5 beyond scope host.",
    )
    include: Annotated[tuple[str, ...], NoDecode] = Field(
        (), validation_alias=_named("include"), description="Only URLs like these."
    )
    exclude: Annotated[tuple[str, ...], NoDecode] = Field(
        (), validation_alias=_named("exclude"), description="No URLs like these."
    )
    robots: bool = Field(True, validation_alias=_named("robots"), description="Obey robots.txt.")
    no_robots: bool = Field(
        False, validation_alias=_named("no_robots"), description="Do not ask for robots.txt."
    )
    allow_private: bool = Field(
        False, validation_alias=_named("allow_private"), description="Allow addresses that are not public."
    )
    retries: int = Field(
        3, validation_alias=_named("retries"), ge=1, description="Failed visits until a URL is dead."
    )
    lease: float = Field(
        60.0, validation_alias=_named("lease"), gt=0, description="Seconds a worker holds a URL."
    )
    timeout: float = Field(
        60.0,
        validation_alias=_named("timeout", "REQUEST_TIMEOUT"),
        gt=0,
        description="Seconds that one fetch may take in all.",
    )
    max_body: int = Field(
        10 * 1024 * 1024,
        validation_alias=_named("max_body"),
        ge=1024,
        description="Decoded bytes of one page.",
    )
    cache: float = Field(
        60.0, validation_alias=_named("cache"), ge=0, description="Seconds a response may be served again."
    )
    user_agent: str = Field(
        "", validation_alias=_named("user_agent"), description="How we introduce ourselves."
    )
    headers: dict[str, str] = Field(
        {}, validation_alias=_named("headers"), description="Sent to the hosts of the start URLs only."
    )
    fields: Annotated[tuple[str, ...], NoDecode] = Field(
        (), validation_alias=_named("fields"), description="Fields of the site item."
    )
    connect_attempts: int = Field(
        10,
        validation_alias=_named("connect_attempts"),
        ge=1,
        le=1000,
        description="How often `worker`, `up` and `run` try to reach the frontier's server when they start.",
    )
    http2: bool = Field(
        False, validation_alias=_named("http2"), description="Speak HTTP/2 where TLS offers it."
    )
    host: str = Field(
        "127.0.0.1",
        validation_alias=_named("host"),
        description="Where `shoal serve` listens. Any other address than loopback needs a token.",
    )
    port: int = Field(
        8000, validation_alias=_named("port"), ge=0, le=65535, description="Its port; 0 takes a free one."
    )
    token_file: str = Field(
        ".shoal/token",
        validation_alias=_named("token_file"),
        description="The owner's API token: made at the first start, for its owner's eyes only. Empty: none.",
    )
    tokens: tuple[NamedToken, ...] = Field(
        (),
        validation_alias=_named("tokens"),
        description="More API tokens: `name`, `sha256` of the token, `scopes` (read, submit, admin).",
    )
    require_token: bool = Field(
        False, validation_alias=_named("require_token"), description="Ask for a token on loopback as well."
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        validation_alias=_named("allowed_hosts"),
        description="Names under which the API may be called, besides loopback; behind a proxy its name.",
    )
    api_rate: str = Field(
        "1000/s",
        validation_alias=_named("api_rate"),
        description="API requests of one token, or of one address without a token.",
    )
    max_request: int = Field(
        10 * 1024 * 1024,
        validation_alias=_named("max_request"),
        ge=1024,
        description="Bytes of one API request.",
    )
    health_max_pending: int = Field(
        10_000,
        validation_alias=_named("health_max_pending"),
        ge=0,
        description="`/health` is bad when more URLs than this wait.",
    )
    health_max_failed: float = Field(
        0.1,
        validation_alias=_named("health_max_failed"),
        ge=0,
        description="`/health` is bad when more URLs than this part of the completed ones failed.",
    )
    celery_broker_url: str = Field(
        "redis://localhost:6379/0",
        validation_alias=_named("celery_broker_url", "CELERY_BROKER_URL"),
        description="The broker of Celery workers.",
    )
    celery_result_backend: str = Field(
        "",
        validation_alias=_named("celery_result_backend", "CELERY_RESULT_BACKEND"),
        description="Where Celery keeps results; by default the next database of a Redis broker.",
    )
    celery_task_rate_limit: str = Field(
        "10/m",
        validation_alias=_named("celery_task_rate_limit", "CELERY_TASK_RATE_LIMIT"),
        pattern=r"^(none|\d+(/[smh])?)$",
        description="How often a Celery worker begins one of the public tasks; when set, a visit too.",
    )
    celery_task_max_retries: int = Field(
        3,
        validation_alias=_named("celery_task_max_retries", "CELERY_TASK_MAX_RETRIES"),
        ge=0,
        description="How often a Celery task is tried again.",
    )
    celery_worker_concurrency: int = Field(
        2,
        validation_alias=_named("celery_worker_concurrency", "CELERY_WORKER_CONCURRENCY"),
        ge=1,
        le=256,
        description="Tasks of one Celery worker at a time.",
    )
    celery_batch: int = Field(
        1,
        validation_alias=_named("celery_batch"),
        ge=1,
        le=100,
        description="URLs in one Celery task. With 1, Flower shows every URL; more is faster.",
    )

    @field_validator("routes")
    @classmethod
    def _routes(cls, value: tuple[RouteSetting, ...]) -> tuple[RouteSetting, ...]:
        for rule in value:
            pattern(rule.pattern)
        return value

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
            env_settings,
            TomlConfigSettingsSource(settings_cls),
            PyprojectTomlConfigSettingsSource(settings_cls),
        )

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The routes that count: those that were set, or the usual ones."""
        if not self.routes:
            return DEFAULT_RULES
        return tuple(Rule(**rule.model_dump()) for rule in self.routes)

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
            "allow_private": self.allow_private,
            "retries": self.retries,
            "lease": self.lease,
            "headers": dict(self.headers) or None,
            "fields": self.fields,
            "cache": self.cache,
            "max_body": self.max_body,
            "timeout": self.timeout,
        }
        return JobSpec(**(values | more))

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


def load(**given: Any) -> Settings:
    """The settings with what was given on top. None means not given. Raises UsageError."""
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        said = first["msg"].removeprefix("Value error, ")
        name = name.lower().removeprefix("shoal_")
        # What should be a digest may be the token itself, by mistake: not shown.
        shown = "" if name.startswith("tokens") else f" = {first.get('input')!r}"
        raise UsageError(
            f"{name}{shown}: {said}",
            hint="see --help for what it takes",
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the settings: {error}", hint=f"check {Path('shoal.toml')}") from None
