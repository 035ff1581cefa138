"""The pitfall of a store per process, with real processes, and the warning where there is evidence of it."""

from __future__ import annotations

import sys
import types
import warnings

import pytest

from limitkeeper import Limiter, MemoryStore, SeveralWorkers, store_from_url
from limitkeeper.stores import worker_warning
from limitkeeper.stores.worker_warning import several_workers

#: Runs `work(number)` in so many children at once; each stays alive until all are done. Their output comes out in order.
FORKS = """
import os, sys, warnings, limitkeeper
from limitkeeper import Limiter, MemoryStore, SeveralWorkers

def children(number, work, together=True):
    pids, ends = [], []
    hold, release = os.pipe()
    for i in range(number):
        answer, say = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(release)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = work(i)
            warned = sum(issubclass(one.category, SeveralWorkers) for one in caught)
            os.write(say, f"{found} {warned}".encode())
            os.close(say)
            os.read(hold, 1)
            os._exit(0)
        os.close(say)
        pids.append(pid)
        ends.append(os.read(answer, 100).decode())
        if not together:
            os.close(release)
            os.waitpid(pids.pop(), 0)
            hold, release = os.pipe()
    os.close(release)
    for pid in pids:
        os.waitpid(pid, 0)
    return [tuple(map(int, end.split())) for end in ends]

def hits(limiter):
    return sum(bool(limiter.hit("user")) for _ in range(20))
"""


@pytest.fixture
def forks(python):
    def run(code: str) -> list[tuple[int, int]]:
        done = python(FORKS + code)
        assert done.returncode == 0, done.stderr
        return eval(done.stdout)  # type: ignore[no-any-return]

    return run


@pytest.fixture
def untold(monkeypatch):
    """Resets the flag that a warning was given."""
    monkeypatch.setattr(worker_warning, "_warned", False)


# The pitfall


def test_ten_processes_with_their_own_memory_admit_ten_times_the_limit(forks):
    """Each of ten workers makes its own limiter of 5: fifty get through, where five should."""
    received = forks("print(children(10, lambda i: hits(Limiter('5/h'))))")
    assert [admitted for admitted, _ in received] == [5] * 10
    assert sum(admitted for admitted, _ in received) == 50


def test_ten_processes_on_one_shared_file_admit_the_limit(forks, tmp_path):
    """The same ten workers with one SharedStore: five are admitted, whichever workers they are."""
    path = str(tmp_path / "limits")
    received = forks(
        f"from limitkeeper import SharedStore\nprint(children(10, lambda i: hits(Limiter('5/h', store=SharedStore({path!r})))))"
    )
    assert sum(admitted for admitted, _ in received) == 5
    assert not any(warned for _, warned in received)


# A store made before a fork


def test_two_children_with_copies_of_one_store_cause_a_warning(forks):
    """Of four workers that inherited a limiter and use it, one warns, once."""
    received = forks("limiter = Limiter('5/h')\nprint(children(4, lambda i: hits(limiter)))")
    assert [admitted for admitted, _ in received] == [5] * 4
    assert [warned for _, warned in received] == [0, 1, 0, 0]


def test_a_memory_url_causes_the_warning_too(forks):
    """memory:// is the same store in URL form."""
    received = forks("limiter = Limiter('5/h', store='memory://?max_keys=50')\nprint(children(2, lambda i: hits(limiter)))")
    assert [warned for _, warned in received] == [0, 1]


@pytest.mark.parametrize("verb", ["limiter.hit_many(['a'])", "limiter.peek('a')", "limiter.acquire('a')", "limiter.reserve('a')"])
def test_every_verb_is_a_use(forks, verb):
    """Whatever verb a child uses first, it is noticed."""
    received = forks(f"limiter = Limiter('5/h')\nprint(children(2, lambda i: {verb} and 1 or 1))")
    assert [warned for _, warned in received] == [0, 1]


def test_a_store_that_was_used_before_the_fork_goes_on_from_there(forks):
    """The parent's charges count in every child's copy, unaffected by the check."""
    received = forks("limiter = Limiter('5/h')\nlimiter.hit('user')\nprint(children(2, lambda i: hits(limiter)))")
    assert [admitted for admitted, _ in received] == [4, 4]


@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("their own limiters", "print(children(4, lambda i: hits(Limiter('5/h'))))"),
        (
            "a store that was written out",
            "limiter = Limiter('5/h', store=MemoryStore())\nprint(children(3, lambda i: hits(limiter)))",
        ),
        ("one child only", "limiter = Limiter('5/h')\nprint(children(3, lambda i: hits(limiter) if i == 1 else 5))"),
        ("one after the other", "limiter = Limiter('5/h')\nprint(children(3, lambda i: hits(limiter), together=False))"),
        ("different limiters", "two = [Limiter('5/h'), Limiter('5/h')]\nprint(children(2, lambda i: hits(two[i])))"),
        ("nobody asks", "limiter = Limiter('5/h')\nprint(children(3, lambda i: 5))"),
    ],
    ids=lambda value: value.replace(" ", "-") if "(" not in value else "",
)
def test_no_false_alarm_in_children(forks, why, code):
    """Pools that make their own limiters, children one after the other, and unused copies are no evidence."""
    received = forks(code)
    assert received == [(5, 0)] * len(received)


# A web server with several workers


@pytest.mark.parametrize(
    ("argv", "environment", "server"),
    [
        (["/bin/gunicorn", "-w", "4", "app:app"], {}, "gunicorn"),
        (["/bin/gunicorn", "-w4", "app:app"], {}, "gunicorn"),
        (["/bin/gunicorn", "app:app", "--workers=4"], {}, "gunicorn"),
        (["/bin/gunicorn", "app:app"], {"GUNICORN_CMD_ARGS": "--bind=0.0.0.0 --workers=3"}, "gunicorn"),
        (["/bin/gunicorn", "app:app"], {"WEB_CONCURRENCY": "2"}, "gunicorn"),
        (["/lib/uvicorn/__main__.py", "app:app", "--workers", "4"], {}, "uvicorn"),
        (["/bin/uvicorn", "app:app"], {"WEB_CONCURRENCY": "8"}, "uvicorn"),
        (["/bin/fastapi", "run", "--workers", "2", "app.py"], {}, "fastapi"),
        (["/bin/hypercorn", "-w", "2", "app:app"], {}, "hypercorn"),
        (["/bin/granian", "app:app"], {"GRANIAN_WORKERS": "2"}, "granian"),
        (["/bin/gunicorn", "app:app"], {}, None),
        (["/bin/gunicorn", "-w", "1", "app:app"], {"WEB_CONCURRENCY": "4"}, None),
        (["/bin/gunicorn", "app:app", "--workers=1"], {"GUNICORN_CMD_ARGS": "-w 4"}, None),
        (["/bin/uvicorn", "app:app", "--workers"], {}, None),
        (["/bin/uvicorn", "-w", "4"], {}, None),  # no flag of uvicorn's
        (["script.py", "--workers", "4"], {"WEB_CONCURRENCY": "4"}, None),
        (["/bin/pytest", "-w", "4"], {"WEB_CONCURRENCY": "4"}, None),
        (["-c"], {"WEB_CONCURRENCY": "4"}, None),
        ([""], {}, None),
        ([], {}, None),
    ],
)
def test_the_number_of_workers_of_a_server_is_read(argv, environment, server):
    """The command line and the environment of a known server are evidence, parsed as it does; nothing else is."""
    assert several_workers(argv, environment, {}) == server


def test_servers_that_configure_it_in_python():
    """gunicorn's arbiter has the workers forked before this one, whatever its configuration file; uWSGI has a number."""
    arbiter = types.SimpleNamespace(Arbiter=types.SimpleNamespace(WORKERS={123: "worker"}))
    assert several_workers(["x"], {}, {"gunicorn.arbiter": arbiter}) == "gunicorn"
    arbiter.Arbiter.WORKERS.clear()
    assert several_workers(["x"], {}, {"gunicorn.arbiter": arbiter}) is None
    assert several_workers(["x"], {}, {"uwsgi": types.SimpleNamespace(numproc=2)}) == "uwsgi"
    assert several_workers(["x"], {}, {"uwsgi": types.SimpleNamespace(numproc=1)}) is None
    assert several_workers(["x"], {}, {"mod_wsgi": types.SimpleNamespace(maximum_processes=2)}) == "mod_wsgi"


@pytest.mark.parametrize("make", [lambda: Limiter("5/s"), lambda: store_from_url("memory://")], ids=["default", "url"])
def test_a_worker_is_warned_once_with_the_remedy(monkeypatch, untold, make):
    """The first limiter of a worker that keeps its state in memory warns, with the remedy; the others do not."""
    monkeypatch.setattr(sys, "argv", ["/bin/gunicorn", "-w", "4", "app:app"])
    with pytest.warns(SeveralWorkers, match=r"gunicorn runs several workers.*SharedStore.*RedisStore") as caught:
        make()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()


def test_a_store_that_was_chosen_is_no_reason_to_warn(monkeypatch, untold, tmp_path):
    """An explicit MemoryStore(), and stores that workers share, cause no warning."""
    monkeypatch.setattr(sys, "argv", ["/bin/gunicorn", "-w", "4", "app:app"])
    Limiter("5/s", store=MemoryStore())
    with store_from_url(f"shared://{tmp_path}/limits") as store:
        Limiter("5/s", store=store)


def test_a_real_command_line_is_seen(python, tmp_path):
    """An interpreter that runs a file called uvicorn with --workers 3 is warned; the same with one worker is not."""
    (tmp_path / "uvicorn").mkdir()
    (tmp_path / "uvicorn" / "__main__.py").write_text("import limitkeeper\nlimitkeeper.Limiter('5/s')\n")
    run = "import sys, runpy; sys.argv = [{0!r}, 'app:app', '--workers', '{1}']; runpy.run_path({0!r}, run_name='__main__')"
    path = str(tmp_path / "uvicorn" / "__main__.py")
    assert "SeveralWorkers: uvicorn runs several workers" in python(run.format(path, 3)).stderr
    assert python(run.format(path, 1)).stderr == ""
