"""Where the stores of this process are and what opens them: our own settings, and those of each maker.

`[store]` in a settings file and `HOLDFAST_STORE_...` are for this program alone, so they take precedence over AWS_...,
AZURE_... and GOOGLE_..., which are for every program on the machine; our variables take precedence over the file. A
setting replaces all of the makers' variables for the same purpose: a key of ours is never combined with somebody
else's session token.

A secret may be in a file instead, which is read again for every call: so it can be replaced while a process works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.env.chain.engines import StoreRefused
from holdfast.env.process import environment
from holdfast.errors import BadSettings
from holdfast.settings import SECRETS, StoreSettings, load

PREFIX: Final = "HOLDFAST_STORE_"
FILE_VARIABLE: Final = "HOLDFAST_CONFIG"
_MOST_BYTES: Final = 64 * 1024
_TRIES: Final = 4

# What the makers' own programs call the same: each setting stands for all of these, and is passed on as the first.
_MAKERS: Final[dict[str, tuple[str, ...]]] = {
    "s3_endpoint": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"),
    "s3_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "s3_access_key_id": ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"),
    "s3_secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "s3_session_token": ("AWS_SESSION_TOKEN", "AWS_TOKEN"),
    "azure_endpoint": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
    "azure_account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"),
    "azure_account_key": (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_SAS_KEY",
    ),
    "google_endpoint": ("GOOGLE_BASE_URL",),
    "google_credentials_file": (
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
}
# They belong together: one of ours replaces all of the makers'.
_TOGETHER: Final = (("s3_access_key_id", "s3_secret_access_key", "s3_session_token"),)

_lock = threading.Lock()
_from_file: tuple[str, Mapping[str, str]] = ("", {})


def use_file(path: str, values: Mapping[str, str]) -> None:
    """Let the stores of this process be opened as a settings file says; BadSettings if another says otherwise."""
    global _from_file  # noqa: PLW0603  as the environment, which it stands for, it is the process's
    with _lock:
        other, earlier = _from_file
        if values and earlier and path != other and values != earlier:
            raise BadSettings(
                f"[store] in {path} differs from {other}, which this process uses already: "
                "all stores of a process are opened alike, so use one file, or a process for each"
            )
        if values or path == other or not other:
            _from_file = (path, dict(values))


def store_settings() -> StoreSettings:
    """Return our settings in force: of the file that was read, and of the environment. Raises BadSettings."""
    found = environment()
    if not _from_file[0] and found.get(FILE_VARIABLE):
        from holdfast.config.settings_file import read_settings
        from holdfast.env import real_world

        read_settings(real_world(), found)  # nobody needed the others of its settings so far
    own = {name.removeprefix(PREFIX).lower(): value for name, value in found.items() if name.startswith(PREFIX)}
    try:
        return load(StoreSettings, {**_from_file[1], **{name: value for name, value in own.items() if value}})
    except BadSettings as error:
        raise BadSettings(f"{PREFIX}...: {error}" if own else f"[store]: {error}") from None


def makers_variables(*, secrets: bool) -> dict[str, str]:
    """Return the environment with our settings in place of the makers' variables, with the `secrets` or without ours.

    Raises StoreRefused if a file with a secret cannot be read, and BadSettings.
    """
    settings, found = store_settings(), dict(environment())
    given = {name for name in _MAKERS if settings.has(name)}
    for together in (*_TOGETHER, *((name,) for name in given)):
        if given.intersection(together):
            for name in together:
                for each in _MAKERS[name]:
                    found.pop(each, None)
    for name in given:
        if secrets or name not in SECRETS:
            value = secret_of(settings, name)
            assert value is not None
            found[_MAKERS[name][0]] = value
    return found


def secret_of(settings: StoreSettings, name: str) -> str | None:
    """Return a setting, or the content of the file that holds it. Raises StoreRefused, which never shows it."""
    path = getattr(settings, f"{name}_file", None)
    if path is None:
        value: str | None = getattr(settings, name)
        return value
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise StoreRefused(f"{path}, which {name}_file names, cannot be read: {error.strerror}") from None
    except ValueError:
        text = ""
    if not text or not text.isprintable():
        raise StoreRefused(f"{path}, which {name}_file names, does not hold one line of text")
    return text


class StoreOptions(msgspec.Struct, frozen=True):
    """What the library for object stores is told beyond the environment."""

    options: dict[str, Any]
    client: dict[str, Any]
    credentials: Callable[[], dict[str, Any]] | None

    def __repr__(self) -> str:
        return f"StoreOptions({sorted(self.options)!r})"


def store_options(scheme: str) -> StoreOptions:
    """Return how to open stores of a kind. Raises StoreRefused, BadSettings."""
    settings = store_settings()
    client: dict[str, Any] = {}
    if settings.ca_file is not None:
        client["root_certificate"] = _certificates(settings.ca_file)
    options, credentials = _KINDS[scheme](settings)
    return StoreOptions({name: value for name, value in options.items() if value is not None}, client, credentials)


def _s3(settings: StoreSettings) -> tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]:
    options: dict[str, Any] = {"endpoint": settings.s3_endpoint, "region": settings.s3_region}
    if settings.s3_endpoint is not None and environment().get("AWS_ENDPOINT_URL_S3"):
        raise StoreRefused("AWS_ENDPOINT_URL_S3 would win over s3_endpoint: remove one of them")
    keys = ("s3_access_key_id", "s3_secret_access_key", "s3_session_token")
    if not settings.has(keys[0]):
        return options, None
    options["skip_signature"] = False
    return options, _Credentials(
        settings, dict(zip(keys, ("access_key_id", "secret_access_key", "token"), strict=True))
    )


def _azure(settings: StoreSettings) -> tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]:
    options = {"endpoint": settings.azure_endpoint, "account_name": settings.azure_account_name}
    if not settings.has("azure_account_key"):
        return options, None
    return options, _Credentials(settings, {"azure_account_key": "access_key"})


def _google(settings: StoreSettings) -> tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]:
    return {"base_url": settings.google_endpoint, "service_account": settings.google_credentials_file}, None


_KINDS: Final[dict[str, Callable[[StoreSettings], tuple[dict[str, Any], Any]]]] = {
    "s3": _s3,
    "az": _azure,
    "gs": _google,
}


class _Credentials:
    """The keys as they are now. The library asks whenever it needs them, if they may change."""

    def __init__(self, settings: StoreSettings, names: Mapping[str, str]) -> None:
        self._settings = settings
        self._names = names
        self._changes = any(getattr(settings, f"{name}_file", None) is not None for name in names)
        self._known = self._read()

    def __call__(self) -> dict[str, Any]:
        # While they are being replaced the last ones may still be good, and if not, the store says so.
        with suppress(StoreRefused):
            self._known = self._read()
        return {**self._known, "expires_at": datetime.now(UTC) if self._changes else None}

    def _read(self) -> dict[str, Any]:
        """Read all of them, again if they changed meanwhile: a key without its secret opens nothing."""
        found: dict[str, Any] = {}
        for _ in range(_TRIES):
            before = found
            found = {theirs: secret_of(self._settings, ours) for ours, theirs in self._names.items()}
            if found == before or not self._changes:
                break
        return found


def _certificates(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise StoreRefused(f"{path}, which ca_file names, cannot be read: {error.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise StoreRefused(f"{path}, which ca_file names, holds no certificates (PEM)")
    return content
