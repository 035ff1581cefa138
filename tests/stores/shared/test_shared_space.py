"""A shared file on a file system without space: a clear error when it is opened or extended, never SIGBUS."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import textwrap

import pytest

from limitkeeper import Limiter, SharedStore, SlidingWindowLog, StoreUnavailable
from limitkeeper.stores.shared import mapped_file
from limitkeeper.testing import ManualClock


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "limits")


@pytest.fixture
def on_tmpfs(tmp_path):
    """Runs a script in a mount namespace of its own, with a tmpfs of so many MiB at `folder`."""
    unshare = ["unshare", "-rm", "sh", "-ec"]
    mount = f"mount -t tmpfs -o size={{}}m none {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*unshare, mount.format(1)], capture_output=True).returncode:
        pytest.skip("needs a mount in a user namespace: 'unshare -rm' is missing or not permitted here")

    def run(size: int, work: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path.parent / f"{tmp_path.name}.py"
        script.write_text("import os\nfrom limitkeeper import *\n" + f"folder = {str(tmp_path)!r}\n" + textwrap.dedent(work))
        command = f"{mount.format(size)}; exec {sys.executable} {script}"
        return subprocess.run([*unshare, command], capture_output=True, text=True, timeout=60)

    return run


def test_defaults_on_a_small_tmpfs_work_without_logs_and_refuse_logs_with_the_remedy(on_tmpfs):
    """64 MiB (Docker's /dev/shm): all that buckets can need fits; logs of 256 entries for 100 000 keys do not, which is an
    error."""
    done = on_tmpfs(
        64,
        """
        store = SharedStore(folder + "/limits")
        limiter = Limiter("5/d", store=store)
        for number in range(2000):
            assert limiter.hit(f"a key longer than its cell {number}")
        try:
            Limiter(SlidingWindowLog("100/h"), store=store)
        except StoreError as error:
            print(error)
        small = SharedStore(folder + "/small", max_keys=1000)
        assert Limiter(SlidingWindowLog("100/h"), store=small).hit("a")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "100000 keys with sliding logs of 256 entries need up to" in done.stdout
    assert "lower log_entries or max_keys, or give another path" in done.stdout


def test_a_file_that_can_not_fit_is_not_opened(on_tmpfs):
    """8 MiB are less than 100 000 keys may need."""
    done = on_tmpfs(
        8,
        """
        try:
            SharedStore(folder + "/limits")
        except StoreUnavailable as error:
            print(error)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "100000 keys need up to" in done.stdout
    assert " MiB are free; lower max_keys, or give another path" in done.stdout


@pytest.mark.parametrize("rule", ["5/d", "sliding window log 50/d"])
@pytest.mark.parametrize("prefix", ["", "a key longer than sixteen bytes, in blocks "])
def test_a_file_system_that_fills_up_later_fails_new_keys_only(on_tmpfs, rule, prefix):
    """When other files have taken the space, new keys raise StoreError, known keys continue, and the file stays consistent. Space
    that comes back is used."""
    done = on_tmpfs(
        64,
        f"""
        import sys
        sys.path.insert(0, {str(__file__).rsplit("/", 1)[0]!r})
        from shared_file import Picture

        store = SharedStore(folder + "/limits", max_keys=20_000, log_entries=64)
        limiter = Limiter({rule!r}, store=store)
        pair = Limiter({{"a": "5/d", "b": {rule!r}}}, store=store)
        for number in range(100):
            assert limiter.hit({prefix!r} + str(number))
        before = limiter.peek({prefix!r} + "0").remaining
        with open(folder + "/other", "wb", buffering=0) as file:
            try:
                while file.write(bytes(65536)):
                    pass
            except OSError:
                pass
        failed = 0
        for number in range(5000):
            try:
                (pair if number % 3 else limiter).hit({prefix!r} + f"new {{number}}")
            except StoreError as error:
                failed += 1
                assert "No space left on device" in str(error), error
        assert failed > 1000, failed
        assert limiter.peek({prefix!r} + "0").remaining == before
        assert limiter.hit({prefix!r} + "0")
        assert Picture(folder + "/limits").problems == []
        os.unlink(folder + "/other")
        assert limiter.hit({prefix!r} + "later") and pair.hit({prefix!r} + "later")
        assert Picture(folder + "/limits").problems == []
        """,
    )
    assert done.returncode == 0, done.stderr


def test_a_limit_on_the_size_of_files_is_an_error_of_the_store(path, python):
    """RLIMIT_FSIZE below the size of the file: StoreUnavailable with the size and the remedy; a smaller file opens."""
    done = python(
        f"""
        import resource
        from limitkeeper import Limiter, SharedStore, StoreUnavailable

        resource.setrlimit(resource.RLIMIT_FSIZE, ({100 << 20}, {resource.RLIM_INFINITY}))
        try:
            SharedStore({path!r})
        except StoreUnavailable as error:
            print(error)
        with SharedStore({path!r}, max_keys=1000) as store:
            assert Limiter("5/d", store=store).hit("a")
        """
    )
    assert done.returncode == 0, done.stderr
    assert "MiB: [Errno 27] File too large; lower max_keys or log_entries, or give another path" in done.stdout


def test_a_limit_on_the_address_space_is_an_error_of_the_store(path, python):
    """RLIMIT_AS below the size of the file: StoreUnavailable with the size and the remedy; a smaller file opens."""
    done = python(
        f"""
        import resource
        from limitkeeper import Limiter, SharedStore, StoreUnavailable

        resource.setrlimit(resource.RLIMIT_AS, ({600 << 20}, {resource.RLIM_INFINITY}))
        try:
            SharedStore({path!r})
        except StoreUnavailable as error:
            print(error)
        with SharedStore({path + "-small"!r}, max_keys=1000) as store:
            assert Limiter("5/d", store=store).hit("a")
        """
    )
    assert done.returncode == 0, done.stderr
    assert "MiB: [Errno 12] Cannot allocate memory; lower max_keys or log_entries, or allow" in done.stdout


def test_a_file_system_that_can_not_allocate_is_used_as_it_is(path, monkeypatch):
    """Where posix_fallocate is not supported the file opens, without a check of its space."""

    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(mapped_file.os, "posix_fallocate", unsupported)
    with SharedStore(path) as store:
        assert Limiter(SlidingWindowLog("5/h"), store=store).hit("a")


def test_no_space_when_a_file_is_made_is_an_error_of_the_store(path, monkeypatch):
    """The space can be gone between the check and the allocation; the next opener of the path creates the file."""
    with monkeypatch.context() as patch:
        patch.setattr(mapped_file, "allocate_space", lambda *_: 28)
        with pytest.raises(StoreUnavailable, match="No space left on device; lower max_keys or log_entries"):
            SharedStore(path)
    with SharedStore(path, clock=ManualClock()) as store:
        assert Limiter("5/h", store=store).hit("a")


def test_a_tmpfs_without_a_size_has_space(on_tmpfs):
    """A tmpfs mounted with size=0 has no bound and reports zero blocks."""
    done = on_tmpfs(0, "assert Limiter(SlidingWindowLog('5/h'), store=SharedStore(folder + '/limits')).hit('a')")
    assert done.returncode == 0, done.stderr
