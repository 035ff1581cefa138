"""The watch of a file: every change is noticed, nothing else is, and mistakes are logged once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import limitkeeper
from limitkeeper import MemoryStore
from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import file_watcher as watching
from limitkeeper.policy.file_watcher import FileWatcher
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.model import Policy
from limitkeeper.policy.request_context import WrittenRequest
from limitkeeper.stores.guarded.deadline_store import start_daemon
from limitkeeper.testing import ManualClock

SOON = "10ms"


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "limitkeeper.yaml"
    path.write_text("one")
    return path


@pytest.fixture
def watched(file):
    """Watches a file from its text at the beginning; `seen` are its contents at each reported change."""
    begun = []

    class Watched:
        def __init__(self, path=file, **more):
            self.seen: list[str] = []
            self.watch = FileWatcher(path, lambda: self.seen.append(Path(path).read_text()), SOON, **more)
            begun.append(self.watch)

    yield Watched
    for watch in begun:
        watch.stop()


def replaced(path: Path, text: str) -> None:
    """As careful editors and deployments save: a new file, renamed over the old one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.mark.parametrize("write", [Path.write_text, replaced], ids=["in place", "renamed over"])
def test_a_change_is_reported(watched, file, eventually, write):
    """However it is saved, and however often."""
    received = watched()
    for text in ("two", "three", "four, longer"):
        write(file, text)
        eventually(lambda text=text: received.seen[-1:] == [text])
    assert received.seen == ["two", "three", "four, longer"]


def test_an_unchanged_file_is_not_reported(watched, file):
    """Touched, or written again with the same text: nothing has changed."""
    received = watched()
    for _ in range(3):
        os.utime(file)
        time.sleep(0.1)
        replaced(file, "one")
        time.sleep(0.1)
    assert received.seen == []


def test_a_change_of_the_same_length_at_the_same_moment_is_reported(watched, file, eventually):
    """A file may change twice within one tick of the clock that dates it: a recent one is read again."""
    received = watched()
    replaced(file, "two")
    eventually(lambda: received.seen == ["two"])
    stat = file.stat()
    with open(file, "r+") as same:
        same.write("owt")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    eventually(lambda: received.seen == ["two", "owt"])


def test_a_file_that_goes_away_and_comes_back(watched, file, eventually, caplog):
    """A missing file is no change and is logged once; back with the same text it is no change either, with another it is."""
    received = watched()
    file.unlink()
    eventually(lambda: "is missing" in caplog.text)
    time.sleep(0.1)
    replaced(file, "one")
    time.sleep(0.2)
    assert received.seen == []
    file.unlink()
    eventually(lambda: caplog.text.count("is missing") == 2)
    replaced(file, "two")
    eventually(lambda: received.seen == ["two"])


def test_a_file_that_comes_later_is_a_change(watched, tmp_path, eventually):
    """The file may not exist yet when the watch begins."""
    received = watched(tmp_path / "later.yaml")
    (tmp_path / "later.yaml").write_text("here")
    eventually(lambda: received.seen == ["here"])


def test_a_swapped_link_is_a_change(watched, tmp_path, eventually):
    """The file is a link into a linked folder, and that link is swapped, as Kubernetes delivers ConfigMaps."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "limitkeeper.yaml").write_text(version)
    os.symlink("one", tmp_path / "..data")
    os.symlink("..data/limitkeeper.yaml", tmp_path / "linked.yaml")
    received = watched(tmp_path / "linked.yaml")
    os.symlink("two", tmp_path / "..data_tmp")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    eventually(lambda: received.seen == ["two"])


def test_a_file_that_is_being_written_is_waited_for(watched, file, eventually, monkeypatch):
    """Half a file is not reported while the other half is still being written."""
    monkeypatch.setattr(watching, "SETTLED", 5.0)  # longer than any machine stalls between two lines
    received = watched()
    with open(file, "w") as slow:
        for _ in range(20):
            slow.write("line\n")
            slow.flush()
            time.sleep(0.01)
    eventually(lambda: received.seen != [])
    assert received.seen == ["line\n" * 20]


def test_other_files_are_watched_too(watched, file, tmp_path, eventually):
    """A key file that the policy names is part of it."""
    key = tmp_path / "jwt.pub"
    replaced(key, "key 1")
    received = watched(more=lambda: [key])
    replaced(key, "key 2")
    eventually(lambda: received.seen == ["one"])
    key.unlink()
    time.sleep(0.1)
    assert received.seen == ["one"]


@pytest.mark.parametrize("name", ["limitkeeper.yaml", "jwt.pub"])
def test_a_file_that_may_be_read_later_is_a_change(watched, file, tmp_path, eventually, caplog, monkeypatch, name):
    """Permissions that come after a new version of a file, or of a key, change no modification time: it is loaded anyway."""
    (tmp_path / "jwt.pub").write_text("key 1")
    received = watched(more=lambda: [tmp_path / "jwt.pub"], utc_us=lambda: 0)
    opened, denied = Path.open, {str(tmp_path / name)}

    def open_file(path, mode="r", *arguments, **options):
        if str(path) in denied and mode == "rb":
            raise PermissionError(13, "Permission denied")
        return opened(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_file)
    replaced(tmp_path / name, "two")
    eventually(lambda: "can't be read" in caplog.text)
    time.sleep(0.2)
    assert received.seen == []
    denied.clear()
    eventually(lambda: received.seen == [file.read_text()])
    assert caplog.text.count("can't be read") == 1


def test_a_folder_changes_with_the_names_in_it(tmp_path, eventually):
    """Files that are added, removed and renamed are changes, also of the first one, and so is a changed text."""
    folder = tmp_path / "limits"
    folder.mkdir()
    (folder / "b.yaml").write_text("b")
    found = lambda: {one.name: one.read_text() for one in folder.iterdir()}  # noqa: E731
    seen = []
    watch = FileWatcher(folder, lambda: seen.append(found()), SOON, more=lambda: list(folder.iterdir()))
    try:
        replaced(tmp_path / "c.yaml", "c")
        os.replace(tmp_path / "c.yaml", folder / "c.yaml")
        eventually(lambda: seen[-1:] == [{"b.yaml": "b", "c.yaml": "c"}])
        os.replace(folder / "b.yaml", folder / "d.yaml")
        eventually(lambda: seen[-1:] == [{"d.yaml": "b", "c.yaml": "c"}])
        (folder / "c.yaml").write_text("changed")
        eventually(lambda: seen[-1:] == [{"d.yaml": "b", "c.yaml": "changed"}])
        (folder / "c.yaml").unlink()
        eventually(lambda: seen[-1:] == [{"d.yaml": "b"}])
    finally:
        watch.stop()


def test_a_listener_that_raises_is_logged_and_called_at_the_next_change(file, eventually, caplog):
    """The watch continues."""
    seen = []

    def changed():
        seen.append(file.read_text())
        raise RuntimeError("no")

    watch = FileWatcher(file, changed, SOON)
    try:
        replaced(file, "two")
        eventually(lambda: seen == ["two"])
        replaced(file, "three")
        eventually(lambda: seen == ["two", "three"])
    finally:
        watch.stop()
    assert "could not be loaded" in caplog.text


def test_a_stopped_watch_reports_nothing(watched, file):
    """Its thread has ended; a second stop does nothing."""
    received = watched()
    received.watch.stop()
    received.watch.stop()
    assert not received.watch.thread.is_alive()
    replaced(file, "two")
    time.sleep(0.1)
    assert received.seen == []


def test_threads_and_times_come_from_what_it_is_given(watched, file, eventually):
    """A simulator can drive it: nothing is started, waited for or dated in another way."""
    started, paused, dated = [], [], []

    def start(target, name):
        started.append(name)
        return start_daemon(target, name)

    received = watched(start_thread=start, sleep=paused.append, utc_us=lambda: len(dated) or dated.append(0) or 0)
    replaced(file, "two")
    eventually(lambda: received.seen == ["two"])
    assert started == ["limitkeeper watch"]
    assert set(paused) == {watching.SETTLED}
    assert dated == [0]


def test_a_program_may_change_its_folder(watched, file, eventually, monkeypatch, tmp_path):
    """A relative path is resolved when the watch begins."""
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    watch = FileWatcher("limitkeeper.yaml", lambda: seen.append("changed"), SOON)
    try:
        monkeypatch.chdir("/")
        replaced(file, "two")
        eventually(lambda: seen == ["changed"])
    finally:
        watch.stop()


def test_an_interval_of_nothing_is_refused(file):
    """The file is not read continuously."""
    with pytest.raises(ConfigurationError, match="at least 10ms"):
        FileWatcher(file, lambda: None, 0)


hanging_up = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")


@hanging_up
def test_sighup_loads_at_once_and_calls_the_earlier_handler_too(file, eventually):
    """Even without a change; afterwards the earlier handler is restored."""
    heard, seen = [], []
    before = signal.signal(signal.SIGHUP, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGHUP)
    try:
        watch = FileWatcher(file, lambda: seen.append("loaded"), "1h", hang_up=True)
        assert watch.hangs_up
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: seen == ["loaded"])
        assert heard == [signal.SIGHUP]
        watch.stop()
        assert signal.getsignal(signal.SIGHUP) is mine
    finally:
        signal.signal(signal.SIGHUP, before)


@hanging_up
def test_several_watches_receive_one_signal(file, eventually):
    """Stopped in whatever order, none takes the signal from another, and the process is not ended by it."""
    before = signal.getsignal(signal.SIGHUP)
    seen: list[str] = []
    one = FileWatcher(file, lambda: seen.append("one"), "1h", hang_up=True)
    two = FileWatcher(file, lambda: seen.append("two"), "1h", hang_up=True)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: sorted(seen) == ["one", "two"])
        one.stop()
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: sorted(seen) == ["one", "two", "two"])
    finally:
        two.stop()
        one.stop()
        signal.signal(signal.SIGHUP, before)


@hanging_up
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
def test_a_program_ends_with_its_terminal(file, tmp_path, closed):
    """SIGHUP from a closed terminal ends a program as usual; from any other sender it loads the file."""
    code = f"""
import os, signal, threading
from limitkeeper.policy.file_watcher import FileWatcher
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests under nohup has it ignored
loaded = threading.Event()
watch = FileWatcher({str(file)!r}, loaded.set, "1h", hang_up=True)
print("ready", flush=True)
# A signal that another thread gets does not wake this one.
os._exit(7 if any(loaded.wait(0.1) for _ in range(600)) else 8)
"""
    import pty

    child, terminal = pty.fork()
    if child == 0:
        os.environ["PYTHONPATH"] = os.path.dirname(limitkeeper.__path__[0])
        os.execv(sys.executable, [sys.executable, "-c", code])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1000)
    if not closed:
        os.kill(child, signal.SIGHUP)
        ended = os.waitpid(child, 0)[1]
    os.close(terminal)
    if closed:
        ended = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(ended) == (-signal.SIGHUP if closed else 7)


def test_without_the_main_thread_there_is_no_signal(file):
    """In other threads signals can't be handled: the watch logs that and continues."""
    made: list[FileWatcher] = []
    thread = threading.Thread(target=lambda: made.append(FileWatcher(file, lambda: None, SOON, hang_up=True)))
    thread.start()
    thread.join()
    assert not made[0].hangs_up
    made[0].stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_process_watches_for_itself(watched, file):
    """Workers that are forked from a process with a policy notice changes, each in a thread of its own."""
    received = watched()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for _ in range(3000):
                if received.seen == ["two"]:
                    code = 0
                    break
                time.sleep(0.01)
        finally:
            os._exit(code)
    replaced(file, "two")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# A gate's policy

POLICY = """
limits:
  - name: api
    key: ip
    limit: {limit}
"""


@pytest.fixture
def gate(file):
    """A gate on a watched policy file."""
    replaced(file, POLICY.format(limit="fixed window 3/min"))
    with Gate(file, store=MemoryStore(clock=ManualClock())) as gate:
        gate.watch(SOON)
        yield gate


def passed(gate: Gate, times: int) -> list[bool]:
    return [bool(gate.ask(WrittenRequest())) for _ in range(times)]


def test_a_policy_that_loads_is_enforced_and_one_that_does_not_is_refused(gate, file, eventually):
    """Each mistake once, with its line; the old policy stays until a valid one comes, and charges are kept."""
    refused = []
    gate.events.on("reload refused", lambda event: refused.append(str(event.error)))
    assert passed(gate, 3) == [True, True, True]
    replaced(file, POLICY.format(limit="fixed window lots"))
    eventually(lambda: len(refused) == 1)
    os.utime(file)
    time.sleep(0.15)
    assert len(refused) == gate.snapshot().reloads_refused == 1
    assert "limitkeeper.yaml:5" in refused[0]
    assert passed(gate, 1) == [False]
    replaced(file, POLICY.format(limit="fixed window 4/min"))
    eventually(lambda: gate.snapshot().reloads == 1)
    assert passed(gate, 2) == [True, False]


def test_a_file_that_changed_before_the_watch_began_is_loaded(file, eventually):
    """A gate may be made long before its watch begins, as in a process that forks its workers later."""
    replaced(file, POLICY.format(limit="fixed window 3/min"))
    with Gate(file, store=MemoryStore(clock=ManualClock())) as gate:
        replaced(file, POLICY.format(limit="fixed window 1/min"))
        gate.watch("1h")
        eventually(lambda: gate.snapshot().reloads == 1)
        assert passed(gate, 2) == [True, False]


@hanging_up
def test_a_gate_handles_sighup(file, eventually):
    """The file is loaded at once; a closed gate no longer handles the signal."""
    before = signal.getsignal(signal.SIGHUP)
    replaced(file, POLICY.format(limit="fixed window 3/min"))
    with Gate(file, store=MemoryStore(clock=ManualClock())) as gate:
        gate.watch("1h")
        replaced(file, POLICY.format(limit="fixed window 1/min"))
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: gate.snapshot().reloads == 1)
        assert passed(gate, 2) == [True, False]
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_file_that_is_gone_leaves_the_gate_as_it_is(gate, file, eventually, caplog):
    """Neither refused nor reloaded: it is logged, once."""
    file.unlink()
    eventually(lambda: "is missing" in caplog.text)
    assert passed(gate, 4) == [True, True, True, False]
    assert (gate.snapshot().reloads, gate.snapshot().reloads_refused) == (0, 0)


def test_a_key_file_is_part_of_the_policy(file, tmp_path, eventually):
    """The files that the policy was read from are watched too."""
    key = tmp_path / "jwt.key"
    replaced(key, "a secret of thirty-two bytes, or more")
    replaced(file, POLICY.format(limit="fixed window 3/min"))
    policy = replace(Policy.load(file), files=(key,))
    with Gate(policy, store=MemoryStore(clock=ManualClock())) as gate:
        gate.watch(SOON)
        replaced(key, "another secret of thirty-two bytes, or more")
        eventually(lambda: gate.snapshot().reloads == 1)


def test_a_policy_from_no_file_can_not_be_watched():
    """The error names the right form."""
    with Gate(Policy(), store=MemoryStore()) as gate, pytest.raises(ConfigurationError, match=r"use Policy.load\(path\)"):
        gate.watch()


def test_a_key_that_comes_later_than_the_file_that_names_it_is_taken(file, tmp_path, eventually):
    """A new version names a key file that does not exist yet: it is refused, once, and tried again when the file exists."""
    file.write_text("limits: [{name: a, key: ip, limit: 1/s}]")
    with Gate(Policy.load(file), store=MemoryStore()) as gate:
        gate.watch(SOON)
        jwt = "{jwt: {claim: sub, key_file: later.key, algorithms: [HS256]}}"
        replaced(file, f"identify: {{user: {jwt}}}\nlimits: [{{name: b, key: user, limit: 1/s}}]")
        eventually(lambda: gate.snapshot().reloads_refused == 1)
        replaced(tmp_path / "later.key", "a shared secret of at least 32 bytes")
        eventually(lambda: gate.snapshot().reloads == 1)  # counted last
        assert [rule.name for rule in gate.policy.rules] == ["b"]
        assert gate.snapshot().reloads_refused == 1
