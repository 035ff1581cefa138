"""Each log and load-test format is read from a small file; broken files are refused with file, line and remedy."""

from __future__ import annotations

import gzip
import shutil

import pytest

from limitkeeper import ConfigurationError
from limitkeeper.plan import LogReader, analyze, read_measurements

NOON = 1768219200.0


def entries(path):
    return list(LogReader(path))


def test_nginx_lines_have_time_request_status_and_request_time(files):
    """The combined format with $request_time at the end or as a field; a zone is counted, a broken request is kept as '/'."""
    reader = LogReader(files / "nginx.log")
    first, refused, failed, broken = reader
    assert reader.format == "nginx access log"
    assert (first.time, first.duration, first.status, first.method, first.path) == (NOON, 0.2, 200, "POST", "/checkout")
    assert (first.ip, first.fields["user"]) == ("203.0.113.9", "u42")
    assert refused.refused
    assert not refused.failed
    assert (failed.time, failed.duration, failed.failed) == (NOON + 2, 5.0, True)
    assert failed.fields["tenant"] == "acme corp"
    assert (broken.method, broken.path, broken.duration) == ("GET", "/", 0.6)


def test_uvicorn_lines_have_what_their_log_config_adds(files):
    """The default format has neither time nor duration; both are read where they were added."""
    reader = LogReader(files / "uvicorn.log")
    plain, timed, failed = reader
    assert reader.format == "uvicorn access log"
    assert (plain.time, plain.duration, plain.ip, plain.path) == (None, None, "127.0.0.1", "/products")
    assert (timed.time, timed.duration, timed.fields["user"]) == (NOON + 1.25, 0.1255, "u42")
    assert (failed.time, failed.failed, failed.duration) == (NOON + 2, True, 3.0)


def test_json_lines_are_read_by_the_names_of_their_fields(files):
    """Names and units differ between programs: milliseconds, seconds, microseconds; ISO times, seconds, milliseconds."""
    first, second, third = entries(files / "requests.jsonl")
    assert (first.time, first.duration, first.path, first.fields["user"]) == (NOON, 0.2, "/checkout", "u42")
    assert (second.time, second.duration, second.method, second.path) == (NOON + 1.5, 0.6, "GET", "/products")
    assert (third.time, third.refused, third.path) == (NOON + 2, True, "/cart")
    assert third.duration == pytest.approx(0.0009)


def test_k6_points_are_requests(files):
    """Of k6's JSON output the points of http_req_duration count; status 0 is an error, 429 a refusal."""
    found = read_measurements(files / "k6_points.json")
    assert (found.requests, found.errors, found.refused, found.samples.count) == (3, 1, 1, 1)
    assert found.samples.percentile(50) == 0.2


@pytest.mark.parametrize("name", ["k6_summary.json", "k6_summary.txt", "hey.txt", "locust_stats.csv"])
def test_summaries_of_load_generators_are_one_step(files, name):
    """k6's summary, hey's and locust's statistics of the same test: 500 RPS, p50 200 ms, p95 600 ms, mean 250.5 ms."""
    (step,) = read_measurements(files / name).steps
    assert step.load == 500.0
    assert step.percentiles[50.0] == pytest.approx(0.2)
    assert step.percentiles[95.0] == pytest.approx(0.6)
    assert step.mean == pytest.approx(0.2505)


def test_hey_counts_refusals_apart_from_errors(files):
    """150 answers 429 are refusals; 50 answers 503 and 10 timeouts are errors of 10 000 requests."""
    (step,) = read_measurements(files / "hey.txt").steps
    assert (step.requests, step.errors, step.refused) == (10_000, 60, 150)
    assert step.throughput == pytest.approx(500 * 0.979)


def test_k6_has_its_users_as_concurrency(files):
    """vus_max is the concurrency, and the failed share is taken off the throughput."""
    (step,) = read_measurements(files / "k6_summary.json").steps
    assert (step.in_flight, step.errors) == (125, 300)
    assert step.throughput == pytest.approx(495)


def test_wrk_gives_connections_latencies_and_errors(examples):
    """wrk with --latency: 64 connections, its percentiles, and 15 errors of 12 360 requests."""
    found = read_measurements(examples / "wrk_64_connections.txt")
    (step,) = found.steps
    assert found.format == "wrk"
    assert (step.concurrency, step.requests, step.errors) == (64, 12_360, 15)
    assert step.percentiles[99.0] == pytest.approx(0.88041)
    assert step.mean == pytest.approx(0.1552)


def test_locust_history_is_a_curve_by_user_count(files):
    """One step per user count: the median row; rows without requests are left out."""
    found = read_measurements(files / "locust_stats_history.csv")
    assert [(step.concurrency, step.throughput) for step in found.steps] == [(10, 50), (20, 90)]
    assert [step.percentiles[95.0] for step in found.steps] == pytest.approx([0.26, 0.6])


@pytest.mark.parametrize(
    ("name", "samples"), [("hey.csv", [0.2, 0.6]), ("jmeter.csv", [0.2, 0.6]), ("plain.txt", [0.2, 0.6, 1.5])]
)
def test_tables_and_lists_of_latencies_are_samples(files, name, samples):
    """hey's CSV is in seconds, JMeter's in milliseconds; a list may have units."""
    found = read_measurements(files / name)
    assert list(found.samples.ordered()) == pytest.approx(samples)


def test_compressed_logs_are_read(files, tmp_path):
    """A log that was rotated and compressed gives the same."""
    with (files / "nginx.log").open("rb") as plain, gzip.open(tmp_path / "nginx.log.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    assert entries(tmp_path / "nginx.log.gz") == entries(files / "nginx.log")


def test_requests_with_times_make_a_curve(tmp_path):
    """Windows of similar load are one step: 60 s at 10 RPS and 200 ms, then 60 s at 50 RPS and 900 ms."""
    lines = [f'{{"time": {NOON + 0.201 + i / 10}, "duration_ms": 200}}' for i in range(600)]
    lines += [f'{{"time": {NOON + 60.901 + i / 50}, "duration_ms": 900}}' for i in range(3000)]
    log = tmp_path / "steps.jsonl"
    log.write_text("\n".join(lines))
    found = read_measurements(log)
    assert [(round(step.load), step.percentiles[95.0]) for step in found.steps] == [(10, 0.2), (50, 0.9)]
    result = analyze(found)
    assert result.limit == 7  # the SLO of p95 is broken at 50 RPS
    assert "broken at 50 RPS (p95 900 ms > 800 ms)" in " ".join(result.reasons())


def test_a_curve_has_a_ceiling_a_knee_and_reasons(examples):
    """The table of loads holds the SLO up to 494 RPS, so the limit is 345; the fitted peak is no lower."""
    found = analyze(read_measurements(examples / "checkout_loads.csv"), slo="p95=800ms,p99=2s")
    assert found.limit == 345
    assert [one.name for one in found.ceilings][1] == "the peak of the scalability law"
    assert found.scalability.knee_throughput < found.scalability.peak_throughput < 1.2 * 572
    text = " ".join(found.reasons())
    assert "The SLO holds up to 494 RPS and is broken at 600 RPS" in text
    assert "the knee is at" in text


def test_files_of_several_loads_make_one_curve(tmp_path, examples):
    """wrk's outputs are ordered by their connections, in whatever order the files are given."""
    text = (examples / "wrk_64_connections.txt").read_text()
    slow = text.replace("64 connections", "256 connections").replace("880.41ms", "2.20s").replace("411.59", "405.00")
    (tmp_path / "b.txt").write_text(slow)
    found = analyze([read_measurements(tmp_path / "b.txt"), read_measurements(examples / "wrk_64_connections.txt")])
    assert [step.concurrency for step in found.steps] == [64, 256]
    assert found.limit is None  # wrk has no p95, and p99 takes its place: 880 ms exceed its objective
    assert "p95 was not measured at every load: the next higher percentile takes its place" in found.warnings()
    assert analyze(read_measurements(tmp_path / "b.txt"), slo="p99=3s").limit == 283


def test_latencies_with_the_safe_concurrency_give_a_limit(examples):
    """The seed's hundred requests with 400 slots: p95 600 ms, 667 RPS, limit 466; without slots there is no limit."""
    found = read_measurements(examples / "checkout_latencies.csv")
    result = analyze(found, total_concurrency=400)
    assert (result.limit, result.burst) == (466, 120)
    text = " ".join(result.reasons())
    assert "200 ms / 600 ms / 1.5 s, by nearest rank" in text
    assert "interpolation gives 400 ms / 645 ms / 1.535 s" in text
    assert "1 of 100 samples took longer than 2 s (the objective of p99), the longest 5 s: timeout risk." in text
    assert analyze(found).limit is None
    assert "Latencies alone give no limit" in " ".join(analyze(found).reasons())


def test_the_error_of_a_sketch_is_printed(examples):
    """Samples beyond the bound are sketched, and the report states the error."""
    found = analyze(read_measurements(examples / "checkout_latencies.csv", keep=10))
    assert "by DDSketch, each within 1%" in " ".join(found.reasons())


def test_sketches_of_several_files_are_merged(examples):
    """Files that were sketched separately are sketched together: 200 samples, and the same percentiles within 1 %."""
    files = [read_measurements(examples / "checkout_latencies.csv", keep=10) for _ in range(2)]
    found = analyze(files).samples
    assert (found.count, found.longest, found.exact) == (200, 5.0, False)
    assert found.percentile(95) == pytest.approx(0.6, rel=0.011)


def test_a_percentile_that_no_load_has_is_warned_about(files):
    """k6's default summary has no p99: its objective is not checked, and the report notes it."""
    warnings = analyze(read_measurements(files / "k6_summary.txt")).warnings()
    assert warnings[0] == "p99 was not measured at every load: its objective is not checked there"
    assert warnings[1].startswith("no load broke the SLO: the limit follows from the highest load")


def test_a_broken_slo_is_a_warning(examples):
    """p99 of 1.5 s against 1 s is named."""
    found = analyze(read_measurements(examples / "checkout_latencies.csv"), slo="p95=800ms,p99=1s")
    assert found.warnings() == ["the SLO is broken: p99 1.5 s > 1 s"]


BROKEN = {
    "empty": ("", "the file is empty; expected latencies"),
    "blank": ("\n \n", "the file is empty"),
    "prose": ("Dear operator,\nall is well.\n", r"log\.txt:1: unknown format: 'Dear operator,'"),
    "malformed": ('{"duration_ms": 1}\n' * 9 + '{"duration_ms": \n', r"log\.txt:10: expected a JSON object.*1 of 10 lines"),
    "no durations": ('INFO:     127.0.0.1:5 - "GET / HTTP/1.1" 200 OK\n', r"no line has a duration \(uvicorn access log\); add"),
    "all failed": ('{"duration_ms": 1, "status": 503}\n', "all 1 requests failed or were refused"),
    "falling loads": ("rps,p95_ms\n100,200\n300,250\n200,240\n", r"log\.txt:4: the load falls from 300 RPS to 200 RPS.*sort"),
    "equal loads": ("rps,p95_ms\n100,200\n100,250\n", r"log\.txt:3: the load falls from 100 RPS to 100 RPS"),
    "not finite": ("rps,p95_ms\n100,200\nnan,250\n", r"log\.txt:3: expected a number in column 'rps' of at least 0, got 'nan'"),
    "endless": ("rps,p95_ms\n100,inf\n", r"log\.txt:2: expected a number in column 'p95_ms' of at least 0, got 'inf'"),
    "no number": ("rps,p95_ms\n100,fast\n", r"log\.txt:2: expected a number in column 'p95_ms', got 'fast'"),
    "falling users": ("users,throughput,p95_ms\n20,90,200\n10,50,100\n", r"log\.txt:3: the concurrency falls from 20 to 10"),
    "no rows": ("rps,p95_ms\n", "the table has no rows"),
    "no load": ("concurrency,p95_ms\n10,100\n", r"log\.txt:2: the row has no load"),
    "interrupted wrk": ("Running 30s test @ http://127.0.0.1/\n  2 threads and 64 connections\n", "no 'Requests/sec'"),
    "a long line": ("1" * 200_000, "unknown format"),
    "nested": ("[" * 60_000, "unknown format"),
    "no time": ('{"duration_ms": 1, "time": NaN}\n', "unknown format"),
    "the year 10000": ('{"duration_ms": 1, "time": "9999-12-31T23:59:59-01:00"}\n', "unknown format"),
    "columns": ("elapsed,label\n" + "1,a\n" * 3 + "1\n", r"log\.txt:5: expected 2 columns, got 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_with_place_and_remedy(name, tmp_path):
    """A file without usable measurements is named, with its line and the remedy."""
    text, message = BROKEN[name]
    file = tmp_path / "log.txt"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_measurements(file)


PACKED = gzip.compress(b"1\n" * 9, mtime=0)


@pytest.mark.parametrize("data", [PACKED[:-9], PACKED[:12] + b"\xff" * 9, b"1\n" * 9], ids=["cut", "damaged", "plain"])
def test_a_damaged_gz_file_is_refused_with_the_reason(data, tmp_path):
    """One that is cut, damaged, or not compressed."""
    file = tmp_path / "log.gz"
    file.write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"log\.gz: can't read the file: "):
        read_measurements(file)


def test_a_missing_file_is_named(tmp_path):
    """The path and the reason."""
    with pytest.raises(ConfigurationError, match=r"none\.log: can't read the file: no such file"):
        read_measurements(tmp_path / "none.log")


def test_a_few_cut_lines_are_skipped_and_said(tmp_path):
    """One cut line of a hundred is skipped, with its number in the notes."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"duration_ms": 5}\n' * 99 + '{"durat\n')
    found = read_measurements(log)
    assert found.samples.count == 99
    assert f"1 of 100 lines were skipped (first: {log}:100: expected a JSON object" in found.notes[0]


def test_an_interrupted_reading_keeps_what_was_read(files):
    """Ctrl-C while a log is read ends with the requests so far, and the report notes it."""
    from limitkeeper.plan import measurement_files

    def interrupted(self):
        yield from list(LogReader(files / "nginx.log"))[:1]
        self.format = "nginx access log"
        raise KeyboardInterrupt

    reader = type("Interrupted", (LogReader,), {"__iter__": interrupted})(files / "nginx.log")
    found = measurement_files.read_log(reader)
    assert found.samples.count == 1
    assert found.notes == ["Reading was interrupted; these are partial results."]
