"""`holdfast profile`: places with a name, for those who work with several."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from holdfast.broker.folder.layout import check_name
from holdfast.cli import places
from holdfast.cli.options import AsJson, TlsKey
from holdfast.cli.output import OK, CommandSection, note, print_json, safe, say, show_table, stdout, table
from holdfast.cli.places import PLACE, argument, option
from holdfast.client.address import is_address, parse_address
from holdfast.errors import InvalidRequest

app = CommandSection("Places with a name, and what it takes to get in there.")

Name: TypeAlias = Annotated[str, argument("NAME", "The profile's name.")]


@app.command("ls")
def ls_command(as_json: AsJson = False) -> int:
    """List the profiles; tokens are not shown."""
    known = places.read()
    if as_json:
        found = [_document(name, each, known.use) for name, each in sorted(known.profiles.items())]
        print_json({"file": str(places.path()), "use": known.use, "profiles": found})
    elif not known.profiles:
        note(f"no profiles in {safe(str(places.path()))}")
    else:
        shown = table("profile", "place", "queue", "token", "in use")
        for name, each in sorted(known.profiles.items()):
            token, used = "yes" if each.token else "", "yes" if name == known.use else ""
            shown.add_row(safe(name), safe(each.place), safe(each.queue or ""), token, used)
        show_table(stdout(), shown)
    return OK


@app.command("add")
def add_command(
    name: Name,
    place: Annotated[str, argument(PLACE, "The data folder, or the address of a server.")],
    token_file: Annotated[
        str | None,
        option("--token-file FILE", "Holds the token that says who you are; `-` is stdin."),
    ] = None,
    tls_ca: Annotated[str | None, option("--tls-ca FILE", "Certificates to trust, for https://.")] = None,
    tls_cert: Annotated[
        str | None,
        option("--tls-cert FILE", "A certificate of your own, where one is asked for."),
    ] = None,
    tls_key: TlsKey = None,
    queue: Annotated[str | None, option("--queue NAME", "The queue that is meant.")] = None,
    use: Annotated[bool, option("--use", "It is the one that is meant where nobody names a place.")] = False,
    as_json: AsJson = False,
) -> int:
    """Add a profile, or replace it. The file with the profiles can be read by you only."""
    check_name(name, "profile")
    _check_tls(place, tls_ca, tls_cert, tls_key)
    if is_address(place):
        parse_address(place)
    else:
        place = str(Path(place).absolute())  # it holds wherever the next command is typed
    new = places.Profile(
        place=place,
        token=None if token_file is None else _token(token_file),
        tls_ca=_absolute(tls_ca),
        tls_cert=_absolute(tls_cert),
        tls_key=_absolute(tls_key),
        queue=queue,
    )
    known = places.read()
    known = msgspec.structs.replace(known, use=name if use else known.use, profiles={**known.profiles, name: new})
    places.write(known)
    if as_json:
        print_json(_document(name, new, known.use))
    else:
        say(f"{safe(name)} is {safe(place)}")
    return OK


@app.command("rm")
def rm_command(name: Name, as_json: AsJson = False) -> int:
    """Forget a profile."""
    known = places.read()
    known.named(name)
    left = {each: profile for each, profile in known.profiles.items() if each != name}
    places.write(places.Profiles(use=None if known.use == name else known.use, profiles=left))
    _say({"name": name, "removed": True}, f"{safe(name)} is forgotten", as_json=as_json)
    return OK


@app.command("use")
def use_command(
    name: Annotated[str | None, argument("[NAME]", "The profile; none to use none.")] = None,
    as_json: AsJson = False,
) -> int:
    """Say which profile is meant where nobody names a place; without a name: none."""
    known = places.read()
    place = None if name is None else known.named(name).place
    places.write(msgspec.structs.replace(known, use=name))
    text = "no profile is in use" if name is None else f"{safe(name)} is in use: {safe(place or '')}"
    _say({"use": name, "place": place}, text, as_json=as_json)
    return OK


def _say(document: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        say(text)


def _check_tls(place: str, ca: str | None, certificate: str | None, key: str | None) -> None:
    if not place.startswith("https://") and (ca, certificate, key) != (None, None, None):
        raise InvalidRequest(
            f"{place} is not a secure address, so --tls-ca, --tls-cert and --tls-key say nothing: use https://"
        )
    if key is not None and certificate is None:
        raise InvalidRequest("--tls-key is the key of a certificate: give that, too, with --tls-cert")


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _token(path: str) -> str:
    token = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest(f"{path} holds no token: it is the one line that `holdfast token new` printed")
    return token


def _document(name: str, profile: places.Profile, use: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "place": profile.place,
        "queue": profile.queue,
        "tls_ca": profile.tls_ca,
        "tls_cert": profile.tls_cert,
        "tls_key": profile.tls_key,
        "has_token": profile.token is not None,
        "in_use": name == use,
    }
