"""Settings: one table, three sources, checked at start."""

from __future__ import annotations

import pytest

from limitkeeper.errors import ConfigurationError
from limitkeeper.service.settings import Address, load

TOKEN = "0123456789abcdef"


def test_the_defaults_are_loopback_and_documented():
    """By default nothing is reachable from other hosts."""
    settings = load({}, {})
    assert {name: str(one) for name, one in settings.listeners().items()} == {
        "http": "127.0.0.1:7070", "resp": "127.0.0.1:7071", "grpc": "127.0.0.1:7072",
        "admin": "127.0.0.1:7073",
    }  # fmt: skip
    assert settings.token is None
    assert settings.workers == 1


def test_flags_before_environment_before_file(tmp_path):
    """And the table shows the source of each value, without secrets."""
    config = tmp_path / "service.toml"
    config.write_text(f'workers = 2\nresp = "off"\ntoken = "{TOKEN}"\nidle_timeout = "1m"\nwatch = false\n')
    environment = {"LIMITKEEPER_WORKERS": "3", "LIMITKEEPER_HTTP": "[::1]:80"}
    settings = load({"workers": "4"}, environment, str(config))
    assert (settings.workers, settings.http, settings.resp) == (4, Address("::1", 80), None)
    assert (settings.idle_timeout, settings.watch) == (60.0, False)
    table = {name: (value, source) for name, value, source in settings.table()}
    assert table["workers"] == ("4", "--workers")
    assert load({"policy": __file__}, {}).sources == {"policy": "POLICY"}
    assert table["http"] == ("[::1]:80", "LIMITKEEPER_HTTP")
    assert table["resp"] == ("off", str(config))
    assert table["max_body"] == ("262144", "default")
    assert TOKEN not in str(table)
    stored = load({"store": f"redis://me:{TOKEN}@cache/0?sentinel_password={TOKEN}"}, {}).table()
    assert ("store", "redis://…@cache/0?sentinel_password=…", "--store") in stored


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "\x00"])
def test_a_file_that_is_no_settings_file(tmp_path, text):
    """It is an error with the file's name, also where it nests too deeply to be read."""
    config = tmp_path / "service.toml"
    config.write_text(text)
    with pytest.raises(ConfigurationError, match="can't read the settings"):
        load({}, {}, str(config))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'token = "{TOKEN}"\n[limitkeeper]\nworkers = 2\n', r"'token' is outside of the table \[limitkeeper\]; write it below"),
        ('limitkeeper = "x"\n', r"expected a table \[limitkeeper\], got 'x'"),
    ],
)
def test_a_setting_outside_of_the_table_is_an_error(tmp_path, text, message):
    """A token that is not read would leave the service open. Tables of other programs are allowed."""
    config = tmp_path / "service.toml"
    config.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        load({}, {}, str(config))
    config.write_text("[other]\na = 1\n[limitkeeper]\nworkers = 2\n")
    assert load({}, {}, str(config)).workers == 2


@pytest.mark.parametrize("place", ["0.0.0.0:7070", ":7070", "[::]:7070", "192.168.1.2:7070", "example.com:7070"])
@pytest.mark.parametrize("name", ["http", "resp", "grpc", "admin"])
def test_a_port_beyond_loopback_needs_a_token(name, place):
    """The service does not start wide open."""
    with pytest.raises(ConfigurationError, match=f"{name}: .* a token is required; set LIMITKEEPER_TOKEN"):
        load({name: place}, {})
    assert load({name: place}, {"LIMITKEEPER_TOKEN": TOKEN}).token == TOKEN


@pytest.mark.parametrize("place", ["127.0.0.1:0", "127.8.8.8:7070", "[::1]:7070", "localhost:7070"])
def test_loopback_needs_none(place):
    """Any address of it."""
    assert load({"http": place}, {}).http


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"http": "7070"}, "--http: expected HOST:PORT"),
        ({"http": "a:99999"}, "expected HOST:PORT"),
        ({"workers": "0"}, "expected a whole number from 1 to 256"),
        ({"workers": "two"}, "expected a whole number"),
        ({"max_body": "1"}, "expected a size from 256"),
        ({"max_body": "64PB"}, "expected a size"),
        ({"idle_timeout": "0"}, "expected a duration"),
        ({"idle_timeout": "soon"}, "expected a duration"),
        ({"token": "short"}, "at least 16 printable characters"),
        ({"watch": "maybe"}, "expected on or off"),
        ({"tls_cert": __file__}, "tls_cert and tls_key belong together"),
        ({"tls_client_ca": __file__}, "tls_client_ca needs tls_cert"),
        ({"policy": "no/such/file"}, "there is no file 'no/such/file'"),
        ({"envoy": "no/such/file"}, "envoy: there is no file 'no/such/file'"),
        ({"http": "127.0.0.1:7071"}, "resp: 127.0.0.1:7071 is already the address of http"),
    ],
)
def test_mistakes_name_their_place_and_the_remedy(flags, message):
    """All at once, before anything is bound."""
    with pytest.raises(ConfigurationError) as caught:
        load({**flags, "reservation_ttl": "never"}, {})
    assert message in str(caught.value)
    assert "--reservation-ttl: expected a duration" in str(caught.value)


def test_a_config_file_with_mistakes(tmp_path):
    """Unknown settings are errors with a suggestion; the error of an unreadable file has the reason."""
    config = tmp_path / "service.toml"
    config.write_text("workrs = 2\n")
    with pytest.raises(ConfigurationError, match="unknown setting 'workrs'; did you mean 'workers'"):
        load({}, {}, str(config))
    config.write_text("workers = 0\n")
    with pytest.raises(ConfigurationError, match=r"service\.toml: workers: expected a whole number"):
        load({}, {"LIMITKEEPER_HTTP": "7099"}, str(config))
    config.write_text("workers = \n")
    with pytest.raises(ConfigurationError, match="can't read the settings"):
        load({}, {}, str(config))
