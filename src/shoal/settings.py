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
"""Environment variables of other systems that count too. `SHOAL_…` wins over them."""

SECRET = ("frontier", "dispatch", "headers", "tokens", "celery_broker_url", "celery_result_backend")
"""Settings whose value is never printed: it may hold a password, or a token by mistake."""


def variables(name: str) -> tuple[str, ...]:
    """Returns the environment variables of a setting; the first that is set counts. No others do: `SCOPE`
    and `APP` belong to other programs."""
    own = f"SHOAL_{name.upper()}"
    return (own, FOREIGN[name]) if name in FOREIGN else (own,)


class _Environment(EnvSettingsSource):
    """Reads the environment by the names that `variables` returns, and no others."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        own, *foreign = variables(field_name)
        # Compose files and unit files pass on other systems' variables empty: that means not set.
        found = os.environ.get(own, next((said for name in foreign if (said := os.environ.get(name))), None))
        return found, field_name, False


class NamedToken(BaseModel):
    """An API token besides the owner's. Only its SHA-256 is stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Literal["read", "submit", "admin"], ...] = ("read",)


class RouteSetting(pydantic.BaseModel):
    """One `[[routes]]` table: a pattern, and the queue, priority and TTL of URLs that match it."""

    model_config = pydantic.ConfigDict(extra="forbid")

    pattern: str
    queue: str = URL_QUEUE
    priority: int = Field(DEFAULT_PRIORITY, ge=1, le=9)
    ttl: float | None = Field(None, gt=0)
    ack: Ack = "reliable"


class Settings(BaseSettings):
    """All settings. The defaults are safe."""

    model_config = SettingsConfigDict(
        toml_file="shoal.toml",
        pyproject_toml_table_header=("tool", "shoal"),
        extra="forbid",
    )

    frontier: str = Field(
        "",
        description="Where URLs and results are stored: `sqlite:///path`, `redis://host:port/0`,"
        " `postgresql://user@host/database` or `memory:`. Empty: `.shoal/shoal.db`.",
    )
    dispatch: str = Field(
        "",
        description="Message broker that delivers URLs to workers: `amqp://user:password@host/vhost`. Empty:"
        " workers claim URLs from the frontier.",
    )
    dispatch_batch: int = Field(
        20,
        ge=1,
        le=1000,
        description="Maximum number of URLs in one broker message.",
    )
    dispatch_prefetch: int | None = Field(
        None,
        ge=1,
        le=2000,
        description="Messages of each broker queue that one worker holds at a time. Default: enough for"
        " twice its `concurrency`.",
    )
    routes: Annotated[tuple[RouteSetting, ...] | None, NoDecode] = Field(
        None,
        description="Routing rules: `[[routes]]` tables with `pattern`, `queue`, `priority`, `ttl` and `ack`."
        " The first rule whose pattern matches a URL applies. Default: built-in rules; `[]` turns them off.",
    )
    app: str = Field("", description="Where your scrapers are defined: `file.py` or `module:app`.")
    scope: Scope = Field("host", description="How far a crawl follows links.")
    rate: str = Field("1/s", description="Maximum rate per host: `2/s`, `30/m` or `none`.")
    request_delay: float | None = Field(
        None,
        ge=0,
        description="Seconds between two pages of one host; another way to set `rate`, which wins.",
    )
    per_host: int = Field(1, ge=1, description="Pages fetched from one host at a time.")
    concurrency: int = Field(
        16,
        ge=1,
        le=2000,
        description="Pages that one worker fetches at a time, not counting those that wait for a slow host.",
    )
    workers: int = Field(1, ge=1, le=256, description="Number of worker processes.")
    max_pages: int = Field(10_000, ge=1, description="Maximum number of pages of one crawl.")
    max_per_host: int = Field(
        1_000,
        ge=1,
        description="Maximum number of pages of one crawl on each host other than the start hosts.",
    )
    depth: int | None = Field(
        None,
        ge=0,
        description="Maximum number of links away from the start. Default: no limit;"
        " 5 with scope `domain` or `any`.",
    )
    include: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Fetch only URLs that match one of these: `*/blog/*`, or `re:` and a regular expression.",
    )
    exclude: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Skip URLs that match one of these; written like `include`."
    )
    robots: bool = Field(True, description="Obey robots.txt.")
    no_robots: bool = Field(False, description="Neither fetch nor obey robots.txt.")
    page_robots: bool = Field(
        False,
        description='Obey `noindex` and `nofollow` in `<meta name="robots">` and `X-Robots-Tag`.',
    )
    allow_private: Annotated[bool | tuple[str, ...], NoDecode] = Field(
        False, description="Allow private and loopback addresses: all of them, or only these `host:port`."
    )
    retries: int = Field(2, ge=0, description="How many times a failed URL is retried.")
    lease: float = Field(
        60.0, gt=0, description="Seconds after which the URLs of a worker that crashed go to other workers."
    )
    timeout: float = Field(
        60.0,
        gt=0,
        description="Maximum number of seconds for one fetch, from start to end.",
    )
    max_body: int = Field(
        10 * 1024 * 1024,
        ge=1024,
        description="Maximum size of one page in bytes, after decompression.",
    )
    cache: float = Field(
        60.0,
        ge=0,
        description="Reuse a response for this many seconds. Above 60, responses are"
        " kept in the frontier, and"
        " later crawls reuse them.",
    )
    user_agent: str = Field("", description="The User-Agent header to send. Empty: shoal's own.")
    headers: dict[str, str] = Field({}, description="Headers to send, to the hosts of the start URLs only.")
    fields: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Fields to keep of each item of the built-in scraper. Empty: all."
    )
    kinds: Literal["text", "any"] = Field(
        "text",
        description="Which responses are downloaded. `text`: pages and documents; video, audio, images, fonts"
        " and archives are skipped once their headers have arrived. `any`: everything. Your own scrapers"
        " default to `any`.",
    )
    connect_attempts: int = Field(
        10,
        ge=1,
        le=1000,
        description="How often `worker`, `up`, `run` and `pump` try to connect to the frontier's server and"
        " the broker at start, and `crawl` to the broker.",
    )
    give_up_after: float | None = Field(
        None,
        ge=0,
        description="Seconds that a worker waits for a failing frontier (full disk, server down) before it"
        " exits with the error; 0 waits for ever. Default: 60 for `crawl`, `run` and crawls in Python, 0 for"
        " `worker`, `up` and `serve`.",
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
    http2: bool = Field(False, description="Use HTTP/2 where the server offers it over TLS.")
    host: str = Field(
        "127.0.0.1",
        description="Address that `shoal serve` listens on. Requests to an address"
        " other than loopback need a token.",
    )
    port: int = Field(
        8000, ge=0, le=65535, description="Port that `shoal serve` listens on; 0 picks a free one."
    )
    token_file: str = Field(
        ".shoal/token",
        description="File with the owner's API token. It is created at the first start, readable by its owner"
        " only. Empty: no such token.",
    )
    tokens: tuple[NamedToken, ...] = Field(
        (),
        description="More API tokens: `name`, `sha256` of the token, and `scopes`"
        " (`read`, `submit`, `admin`).",
    )
    require_token: bool = Field(False, description="Require a token on loopback as well.")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Host names under which the API may be called, besides loopback. Behind a proxy: the"
        " proxy's name.",
    )
    api_rate: str = Field(
        "1000/s",
        description="Maximum rate of API requests per token, or per client address without a token. `5/m`"
        " allows 5 at once, then one every 12 seconds.",
    )
    max_request: int = Field(
        10 * 1024 * 1024,
        ge=1024,
        description="Maximum size of one API request in bytes.",
    )
    health_max_pending: int = Field(
        10_000,
        ge=0,
        description="`/health` reports unhealthy when more URLs than this are waiting.",
    )
    health_max_failed: float = Field(
        0.1,
        ge=0,
        description="`/health` reports unhealthy when failed / completed exceeds this fraction.",
    )
    health_min_finished: int = Field(
        100,
        ge=1,
        description="`/health` ignores failures until this many URLs have completed or failed.",
    )
    celery_broker_url: str = Field(
        "redis://localhost:6379/0",
        description="Broker of the Celery workers.",
    )
    celery_result_backend: str = Field(
        "",
        description="Where Celery stores results. Default: the next database of a Redis broker.",
    )
    celery_task_rate_limit: str = Field(
        "10/m",
        pattern=r"^(none|\d+(/[smh])?)$",
        description="Maximum rate at which one Celery worker starts each public"
        " task. If you set it, it limits"
        " visits too.",
    )
    celery_task_max_retries: int = Field(
        3,
        ge=0,
        description="How many times a failed Celery task is retried.",
    )
    celery_worker_concurrency: int = Field(
        2,
        ge=1,
        le=256,
        description="Tasks that one Celery worker runs at a time.",
    )
    celery_batch: int = Field(
        1,
        ge=1,
        le=100,
        description="URLs in one Celery task. With 1, Flower shows each URL; a larger number is faster.",
    )

    @field_validator("routes", mode="before")
    @classmethod
    def _rules_given(cls, value: Any) -> Any:
        """Text is read as JSON: the environment has nothing else."""
        said = isinstance(value, str)
        if said:
            value = _json(value) if value.strip() else None
        if value is None or (
            isinstance(value, list | tuple) and all(isinstance(rule, dict | RouteSetting) for rule in value)
        ):
            return value
        if said:
            raise UsageError(
                "SHOAL_ROUTES is not a JSON list of rules",
                hint="""write SHOAL_ROUTES='[{"pattern": "*/news/*", "queue": "priority_queue"}]'""",
            )
        raise UsageError(
            "routes is not a list of rules", hint="in shoal.toml, begin each rule with [[routes]]"
        )

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
        """Text with a colon is a list of endpoints; anything else is yes or no."""
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
        """The rules in force: those that were set, even if the list is empty, else the built-in ones."""
        if self.routes is None:
            return DEFAULT_RULES
        return tuple(Rule(**rule.model_dump()) for rule in self.routes)

    @property
    def log_variables(self) -> dict[str, str]:
        """Environment variables that make a child process log like this one."""
        return {"SHOAL_LOG_LEVEL": self.log_level or "info", "SHOAL_LOG_FORMAT": self.log_format}

    @property
    def celery_named(self) -> bool:
        """Whether a broker of Celery workers was named: then those workers do the visits."""
        return "celery_broker_url" in self.model_fields_set

    @property
    def celery_frontier(self) -> str:
        """The frontier of Celery workers: the one that was named, else their broker if it is Redis."""
        if self.frontier:
            return self.frontier
        parts = urlsplit(self.celery_broker_url)
        if parts.scheme not in ("redis", "rediss"):
            return ""
        # Options after `?` are for Celery.
        return parts._replace(query="", fragment="").geturl()

    @property
    def prefetch(self) -> int:
        """Messages of each queue that one worker holds: the next ones wait beside those in progress."""
        return self.dispatch_prefetch or max(2, -(-2 * self.concurrency // self.dispatch_batch))

    @property
    def gap(self) -> float:
        """Seconds between two visits to one host."""
        if self.request_delay is not None and "rate" not in self.model_fields_set:
            return self.request_delay
        return parse_rate(self.rate)

    def spec(self, start: tuple[str, ...], **more: Any) -> JobSpec:
        """Returns the job spec of a crawl with these settings; `more` overrides fields of it."""
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
        """Returns the spec of a crawl that is resumed: its earlier spec, with the settings that were given
        now on top. Defaults were not given, so they change nothing."""
        now = self.spec(earlier.start)
        names = {"gap": {"rate", "request_delay"}, "width": {"per_host"}, "robots": {"robots", "no_robots"}}
        changed = {
            field: getattr(now, field)
            for field in JobSpec.__struct_fields__
            if names.get(field, {field}) & self.model_fields_set
        }
        return msgspec.structs.replace(earlier, **changed)


def _json(text: str) -> Any:
    """Returns the JSON value of a text; the text itself if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def load(**given: Any) -> Settings:
    """Returns the settings, with `given` on top; None means not given. Raises UsageError."""
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
            raise UsageError(
                f"there is no setting {name!r}", hint="docs/reference/settings.md lists all settings"
            ) from None
        said = first["msg"].removeprefix("Value error, ")
        shown = "" if place and place[0] in SECRET else f" = {first.get('input')!r}"
        raise UsageError(f"{name}{shown}: {said}", hint="see --help, or docs/reference/settings.md") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the settings: {error}", hint=f"check {Path('shoal.toml')}") from None


def known(given: Iterable[str]) -> None:
    """Raises UsageError for names that are not settings: a misspelt one would be ignored silently."""
    for name in given:
        if name not in Settings.model_fields:
            raise _unknown(name)


def _unknown(name: str, file: str = "") -> UsageError:
    near = get_close_matches(name.lower(), Settings.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/reference/settings.md lists all settings"
    where = f"{file}: " if file else ""
    return UsageError(f"{where}there is no setting {name!r}", hint=hint)


def _file_of(name: str) -> str:
    in_toml = name in TomlConfigSettingsSource(Settings)()
    return "shoal.toml" if in_toml else "[tool.shoal] of pyproject.toml"
