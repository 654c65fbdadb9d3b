"""The tokens file: what it may say, how mistakes are told, who a token is; and the commands that write it."""

from __future__ import annotations

import hmac
import json
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast.env import real_world
from holdfast.errors import BadSettings
from holdfast.server import tokens as tokens_module
from holdfast.server.tokens import (
    ROLES,
    Patterns,
    TokenEntry,
    Tokens,
    digest_of,
    parse_tokens,
    read_tokens,
    with_entry,
    without_entry,
)
from tests.unit.commands import Run, runner

SHOP = TokenEntry(name="shop", sha256=digest_of("t1"), role="producer", topics=("orders.*",))
WORKER = TokenEntry(name="worker", sha256=digest_of("t2"), role=("consume", "lock"), locks=("jobs/*",))
CERTIFIED = TokenEntry(name="ops", certificate="ops.example", role="admin", expires=datetime(2030, 1, 1, tzinfo=UTC))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("HOLDFAST_CONFIG", raising=False)
    return runner(capsys, monkeypatch)


def file_with(folder: Path, text: str, *, mode: int = 0o600, name: str = "tokens.toml") -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def problem_of(text: str, path: str = "tokens.toml") -> str:
    with pytest.raises(BadSettings) as refused:
        parse_tokens(text.encode(), path)
    return str(refused.value)


def entry_with(line: str) -> str:
    sha256 = "" if line.startswith(("sha256", "certificate")) else f'sha256 = "{"0" * 64}"\n'
    role = "" if line.startswith("role") else 'role = "reader"\n'
    return f'[[tokens]]\nname = "a"\n{sha256}{role}{line}\n'


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("orders", ["orders"], ["orders.eu", "Orders", "orders ", "xorders", ""]),
        ("orders.*", ["orders.eu", "orders.eu.west", "orders."], ["orders", "ordersXeu", "x.orders.eu"]),
        ("*", ["orders", "a/b", "a\nb", ""], []),
        ("a?c", ["abc", "a.c"], ["ac", "abbc"]),
        ("[ab]c", ["[ab]c"], ["ac", "bc"]),
        ("a.c", ["a.c"], ["abc"]),
        ("orders.*.new", ["orders.eu.new"], ["orders.new", "orders.eu.new\n", "orders.eu.new.x"]),
        ("(a|b)+", ["(a|b)+"], ["a"]),
        ("a*" * 30 + "b", ["a" * 30 + "b"], ["a" * 200]),  # and at once
    ],
)
def test_a_pattern_is_compared_with_the_whole_name(pattern: str, matching: list[str], others: list[str]):
    patterns = Patterns([pattern])
    assert [name for name in (*matching, *others) if patterns.match(name)] == matching


def test_no_pattern_reaches_a_name_by_way_of_a_path():
    patterns = Patterns(["orders.*", "shop/*"])
    for name in ("orders.", "orders.x"):
        assert patterns.match(name)
    for name in ("../orders.x", "./orders.x", "orders/../orders.x", "%6frders.x", "shop", "x/shop/a", "orders"):
        assert not patterns.match(name)


def test_a_token_is_known_by_its_hash():
    tokens = Tokens([SHOP, WORKER, CERTIFIED])
    assert tokens.of_token("t1") is SHOP
    assert tokens.of_token("t2") is WORKER
    for other in ("", "t3", "t1 ", "T1", SHOP.sha256, "é\udcff"):
        assert tokens.of_token(other) is None
    assert tokens.of_certificate(["somebody", "ops.example"]) is CERTIFIED
    assert tokens.of_certificate(["OPS.example", "ops"]) is None


def test_every_entry_is_compared_in_constant_time_whichever_it_is(monkeypatch: pytest.MonkeyPatch):
    compared: list[bytes] = []

    class Counted:
        @staticmethod
        def compare_digest(one: bytes, other: bytes) -> bool:
            compared.append(other)
            return hmac.compare_digest(one, other)

    monkeypatch.setattr(tokens_module, "hmac", Counted)
    tokens = Tokens([SHOP, WORKER])
    for token in ("t1", "t2", "t3"):
        compared.clear()
        tokens.of_token(token)
        assert len(compared) == 2


def test_an_entry_known_by_certificate_alone_has_no_token():
    assert Tokens([CERTIFIED]).of_token("") is None
    assert Tokens([TokenEntry(name="x", certificate="c", role="reader"), SHOP]).of_token("t1") is SHOP


def test_what_the_roles_allow():
    wanted = {
        "admin": {"publish", "consume", "read", "admin", "lock"},
        "producer": {"publish"},
        "consumer": {"consume", "read"},
        "reader": {"read"},
    }
    assert wanted == ROLES
    assert WORKER.actions == {"consume", "lock"}


def test_toml_and_json_say_the_same():
    toml = f"""
# who may call
[[tokens]]
name = "shop"
sha256 = "{digest_of("t1")}"
role = "producer"
topics = ["orders.*"]
[[tokens]]
name = "ops"
certificate = "ops.example"
role = "admin"
expires = 2030-01-01T00:00:00Z
"""
    document = {
        "tokens": [
            {"name": "shop", "sha256": digest_of("t1"), "role": "producer", "topics": ["orders.*"]},
            {"name": "ops", "certificate": "ops.example", "role": "admin", "expires": "2030-01-01T00:00:00Z"},
        ]
    }
    assert parse_tokens(toml.encode(), "x.toml").entries == (SHOP, CERTIFIED)
    assert parse_tokens(json.dumps(document).encode(), "x.json").entries == (SHOP, CERTIFIED)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no [[tokens]]; to let nobody in, write tokens = []"),
        ("tokens = 3", "has no [[tokens]]"),
        ("[[token]]\nname = 'x'", "a tokens file has nothing called 'token'"),
        ("[[tokens", "cannot be read: line 1"),
        (entry_with("role = 'root'"), "token 'a' cannot be used: there is no role 'root'; choose from admin, producer"),
        (entry_with("role = []"), "its role allows nothing"),
        (entry_with("role = ['fly']"), "Invalid enum value 'fly'"),
        (entry_with("certificate = ''"), "length >= 1"),
        (entry_with("sha256 = ''"), "neither sha256 nor certificate"),
        (entry_with("sha256 = 'secret'"), "sha256 must be 64 of the digits"),
        (entry_with("topics = 'orders'"), "Expected `array`, got `str` - at `$.topics`"),
        (entry_with("topics = ['']"), "length >= 1"),
        (entry_with("locks = ['x']"), "locks has no effect without the action lock"),
        (entry_with("role = 'producer'\ngroups = ['x']"), "groups has no effect"),
        (entry_with("producers = ['x']"), "producers has no effect without the action publish"),
        (entry_with("create_groups = true"), "create_groups has no effect without the action consume"),
        (entry_with("expires = 2030-01-01T00:00:00"), "expires has no time zone"),
        (entry_with("expire = 3"), "unknown field `expire`"),
        ("[[tokens]]\nrole = 'reader'", "token 1 cannot be used: Object missing required field `name`"),
        ("tokens = [5]", "token 1 cannot be used: Expected `object`"),
        (entry_with("") + entry_with(""), "two tokens have the name a; remove one"),
    ],
)
def test_a_mistake_in_the_file_is_told(text: str, words: str):
    assert words in problem_of(text)
    assert problem_of(text).startswith(("tokens.toml", "the tokens file tokens.toml"))


def test_two_names_for_one_token_are_a_mistake():
    both = with_entry(with_entry("", SHOP, "t"), TokenEntry(name="b", sha256="0" * 64, role="reader"), "t")
    assert "two tokens have the sha256" in problem_of(both.replace("0" * 64, SHOP.sha256))


def test_what_is_no_utf8_or_no_json_is_told():
    assert "cannot be read" in problem_of("{", "t.json")
    assert "must be an object" in problem_of("[]", "t.json")
    with pytest.raises(BadSettings, match="cannot be read"):
        parse_tokens(b"\xff", "tokens.toml")


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o600, None), (0o400, None), (0o640, None), (0o644, "may read"), (0o604, "may read"), (0o660, "may change")],
)
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int, words: str | None):
    path = file_with(tmp_path, "tokens = []\n", mode=mode)
    if words is None:
        assert read_tokens(real_world(), path).entries == ()
        return
    with pytest.raises(BadSettings, match=f"other users {words} the tokens file .*run chmod 600"):
        read_tokens(real_world(), path)


def test_a_file_that_is_not_there_is_told_with_how_to_make_it(tmp_path: Path):
    with pytest.raises(BadSettings, match=r"there is no tokens file .*holdfast token new NAME"):
        read_tokens(real_world(), f"{tmp_path}/none.toml")
    with pytest.raises(BadSettings, match=r"cannot be read|other users may"):
        read_tokens(real_world(), str(tmp_path))


@pytest.mark.parametrize("path", ["t.toml", "t.json"])
def test_entries_are_written_and_taken_out_again(path: str):
    text = with_entry("", SHOP, path)
    text = with_entry(text, WORKER, path)
    text = with_entry(text, CERTIFIED, path)
    assert parse_tokens(text.encode(), path).entries == (SHOP, WORKER, CERTIFIED)
    text = without_entry(text, "worker", path)
    assert parse_tokens(text.encode(), path).entries == (SHOP, CERTIFIED)
    text = without_entry(without_entry(text, "shop", path), "ops", path)
    assert parse_tokens(text.encode(), path).entries == ()
    assert parse_tokens(with_entry(text, SHOP, path).encode(), path).entries == (SHOP,)


def test_comments_in_the_file_stay():
    text = "# ours\n" + with_entry("", SHOP, "t") + "\n# the workers\n"
    text = with_entry(text, WORKER, "t")
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# ours", "# the workers"]
    assert without_entry(text, "worker", "t").startswith("# ours\n[[tokens]]")


def test_an_entry_in_another_form_can_be_taken_out_too():
    both = [f'{{name = "{name}", certificate = "{name}", role = "reader"}}' for name in ("a", "b")]
    text = f"tokens = [{', '.join(both)}]"
    assert [entry.name for entry in parse_tokens(without_entry(text, "a", "t").encode(), "t").entries] == ["b"]


def test_a_new_token_is_printed_once_and_kept_as_its_hash(run: Run, tmp_path: Path):
    path = tmp_path / "tokens.toml"
    done = run("token", "new", "shop", "--role", "producer", "--topics", "orders.*", "--expires", "90d", "--file", path)
    assert done.code == 0, done.err
    token = done.out.strip()
    assert token.startswith("holdfast_")
    assert len(token) == len("holdfast_") + 43  # 256 bits
    assert "Rights of shop: publish on topics orders.*" in done.err
    assert path.stat().st_mode & 0o777 == 0o600
    assert token not in path.read_text()
    (entry,) = read_tokens(real_world(), str(path)).entries
    assert entry.sha256 == digest_of(token)
    assert (entry.name, entry.role, entry.topics) == ("shop", "producer", ("orders.*",))
    left = entry.expires.timestamp() - real_world().clock.now_ns() / 1e9
    assert 89 * 86400 < left <= 90 * 86400
    assert run("token", "new", "x", "--role", "reader", "--file", path).out.strip() != token


def test_names_and_the_right_to_make_groups_are_given_with_a_token(run: Run, tmp_path: Path):
    path = tmp_path / "tokens.toml"
    names = ("--groups", "a.*", "--groups", "shared", "--producers", "payments", "--create-groups")
    done = run("token", "new", "team", "--role", "consume,publish", "--topics", "a.*", *names, "--file", path)
    assert done.code == 0, done.err
    assert "and use the groups a.*, shared and be the producers payments and create groups." in done.err
    (entry,) = read_tokens(real_world(), str(path)).entries
    assert (entry.groups, entry.producers, entry.create_groups) == (("a.*", "shared"), ("payments",), True)
    (document,) = run("token", "ls", "--file", path, "--json").lines
    assert {name: document[name] for name in ("groups", "producers", "locks", "create_groups")} == {
        "groups": ["a.*", "shared"],
        "producers": ["payments"],
        "locks": [],
        "create_groups": True,
    }


def test_a_file_is_checked_as_a_server_would_read_it(run: Run, tmp_path: Path):
    path = file_with(tmp_path, with_entry(with_entry("", SHOP, "t"), CERTIFIED, "t"))
    good = run("token", "check", "--file", path)
    assert good.code == 0
    assert "publish on topics orders.*" in good.out
    assert f"{path} can be used; it has 2 tokens" in good.err
    document = run("token", "check", "--file", path, "--json").document
    assert (document["file"], [each["name"] for each in document["tokens"]], document["expired"]) == (
        path,
        ["shop", "ops"],
        [],
    )
    old = TokenEntry(name="old", sha256="1" * 64, role="reader", expires=datetime(2020, 1, 1, tzinfo=UTC))
    file_with(tmp_path, with_entry(with_entry("", SHOP, "t"), old, "t"))
    assert "it has 2 tokens, of which 1 expired: old" in run("token", "check", "--file", path).err
    file_with(tmp_path, entry_with("role = 'root'"))
    bad = run("token", "check", "--file", path)
    assert (bad.code, bad.out) == (2, "")
    assert "token 'a' cannot be used: there is no role 'root'" in bad.err
    Path(path).chmod(0o644)
    assert "run chmod 600" in run("token", "check", "--file", path, "--json").error["message"]
    assert run("token", "check", "--file", tmp_path / "none").code == 2


def test_tokens_are_listed_without_what_they_could_be_told_by(run: Run, tmp_path: Path):
    path = file_with(tmp_path, with_entry(with_entry("", SHOP, "t"), CERTIFIED, "t"))
    listed = run("token", "ls", "--file", path)
    assert "publish on topics orders.*" in listed.out
    assert "certificate ops.example" in listed.out
    assert SHOP.sha256 not in listed.out
    document = run("token", "ls", "--file", path, "--json").lines
    assert [each["name"] for each in document] == ["shop", "ops"]
    assert SHOP.sha256 not in json.dumps(document)
    assert document[1]["expires"] == "2030-01-01T00:00:00+00:00"


def test_a_token_is_taken_back(run: Run, tmp_path: Path):
    path = file_with(tmp_path, with_entry(with_entry("", SHOP, "t"), WORKER, "t"), mode=0o640)
    assert run("token", "rm", "shop", "--file", path).code == 0
    assert [each["name"] for each in tomllib.loads(Path(path).read_text())["tokens"]] == ["worker"]
    assert Path(path).stat().st_mode & 0o777 == 0o640
    again = run("token", "rm", "shop", "--file", path, "--json")
    assert (again.code, again.error["message"]) == (2, f"{path} has no token called shop; choose one of worker")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "root"], "there is no role 'root'"),
        (["--role", "publish,fly"], "Invalid enum value 'fly'"),
        (["--role", "reader", "--expires", "2020-01-01"], "is in the past"),
        (["--role", "reader", "--locks", "a"], "locks has no effect"),
        ([], "missing option --role"),
    ],
)
def test_a_token_that_cannot_be_is_refused_and_nothing_written(
    run: Run, tmp_path: Path, arguments: list[str], words: str
):
    done = run("token", "new", "shop", "--file", tmp_path / "t.toml", *arguments)
    assert done.code == 2
    assert words in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_given_once(run: Run, tmp_path: Path):
    path = file_with(tmp_path, with_entry("", SHOP, "t"))
    done = run("token", "new", "shop", "--role", "reader", "--file", path)
    assert (done.code, done.out) == (2, "")
    assert "already has a token called shop" in done.err
    assert read_tokens(real_world(), path).entries == (SHOP,)


def test_the_file_is_that_of_the_settings(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert "which tokens file?" in run("token", "ls").err
    path = tmp_path / "etc" / "tokens.toml"
    path.parent.mkdir()
    (path.parent / "holdfast.toml").write_text("[server]\ntokens_file = 'tokens.toml'\n")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(path.parent / "holdfast.toml"))
    done = run("token", "new", "ops", "--role", "admin", "--certificate", "ops.example")
    assert (done.code, done.out) == (
        0,
        "Rights of ops.example: publish, consume, read, admin on topics * and lock on locks *.\n",
    )
    assert path.exists()
