"""The container file and the Kubernetes example, checked as far as a machine without Docker and Kubernetes can."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml
from gateway_servers import is_open, wait_until
from running import Running

import limitkeeper
from limitkeeper.policy import Policy
from servers.valkey import Valkey, free_port

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "examples" / "container" / "Dockerfile").read_text()
MANIFESTS = list(yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "limitkeeper.yaml").read_text()))


def manifest(kind: str, name: str) -> Any:
    return next(one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name))


POD = manifest("Deployment", "limitkeeper")["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_the_manifests_have_the_schema_of_kubernetes(version):
    """Strictly: unknown fields are errors."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    assert len(MANIFESTS) == 8
    for one in MANIFESTS:
        validate(one, version, strict=True)


def test_what_refers_to_each_other_fits():
    """Selectors, ports, secrets and volumes name existing objects; the budget leaves most of the ten replicas."""
    deployment = manifest("Deployment", "limitkeeper")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["replicas"] == 10
    assert deployment["selector"]["matchLabels"] == labels == manifest("Service", "limitkeeper")["spec"]["selector"]
    budget = manifest("PodDisruptionBudget", "limitkeeper")["spec"]
    assert budget["selector"]["matchLabels"] == labels
    assert 0 < budget["maxUnavailable"] < 5
    ports = {one["name"]: one["containerPort"] for one in CONTAINER["ports"]}
    assert {one["targetPort"]: one["port"] for one in manifest("Service", "limitkeeper")["spec"]["ports"]} == ports
    assert {f"0.0.0.0:{port}" for port in ports.values()} == set(re.findall(r"0\.0\.0\.0:\d+", DOCKERFILE))
    secret = manifest("Secret", "limitkeeper")["stringData"]
    assert {one["valueFrom"]["secretKeyRef"]["key"] for one in CONTAINER["env"] if "valueFrom" in one} == set(secret)
    assert POD["volumes"][0]["configMap"]["name"] == manifest("ConfigMap", "limitkeeper-policy")["metadata"]["name"]
    assert f"LIMITKEEPER_POLICY={CONTAINER['volumeMounts'][0]['mountPath']}/limitkeeper.yaml" in DOCKERFILE
    assert f"USER {POD['securityContext']['runAsUser']}:" in DOCKERFILE


@pytest.mark.slow
@pytest.mark.server
def test_a_replica_runs_with_the_manifest(tmp_path):
    """With its policy, its environment and a Valkey with these arguments: probes succeed, and two replicas share a limit."""
    text = manifest("ConfigMap", "limitkeeper-policy")["data"]["limitkeeper.yaml"]
    assert Policy.read(text).instances == manifest("Deployment", "limitkeeper")["spec"]["replicas"]
    (tmp_path / "limitkeeper.yaml").write_text(text.replace("budget: 100ms", "budget: 30s"))
    values = manifest("Secret", "limitkeeper")["stringData"]
    environment = {one["name"]: one.get("value") or values[one["valueFrom"]["secretKeyRef"]["key"]] for one in CONTAINER["env"]}
    arguments = manifest("StatefulSet", "valkey")["spec"]["template"]["spec"]["containers"][0]["args"]
    with Valkey(*arguments) as valkey:
        assert "redis://valkey:6379/0" in environment["LIMITKEEPER_STORE"]
        environment["LIMITKEEPER_STORE"] = f"redis://127.0.0.1:{valkey.port}/0?timeout=30s"
        with Running(policy=tmp_path / "limitkeeper.yaml", environment=environment) as one:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert one.client.get(CONTAINER[probe]["httpGet"]["path"]).status_code == 200
            assert [one.hit("login", "203.0.113.9")[2] for _ in range(2)] == [9, 8]
            with Running(policy=tmp_path / "limitkeeper.yaml", environment=environment) as two:
                assert two.hit("login", "203.0.113.9")[2] == 7


def steps(name: str) -> list[str]:
    """The arguments of the file's instructions of this name, in order."""
    joined = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    return re.findall(rf"^{name} (.+)$", joined, re.M)


@pytest.mark.slow
@pytest.mark.server
def test_the_steps_of_the_container_file(tmp_path):
    """In clean folders: the copied files build wheels, as plain Python here, which install without an index; the entry point
    serves the policy, and refuses to start without a token."""
    for line in steps("COPY"):
        *sources, target = line.split()
        if sources[0].startswith("--from"):
            assert sources == ["--from=build", "/wheels"]
            continue
        place = tmp_path / "image" / target[1:] if target.startswith("/") else tmp_path / "src" / target
        for source in sources:
            copy(ROOT / source, place / source if len(sources) > 1 else place)
    build, install = steps("RUN")
    assert "--no-cache-dir" in build  # here the cache and the build tools of this environment save most of the time
    build = build.replace("--no-cache-dir", "--no-build-isolation")
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("LIMITKEEPER", "PYTHON", "COVERAGE", "COV_"))
    }
    venv.create(tmp_path / "installed", with_pip=True)
    for step, place in ((build, Path(sys.executable).parent), (install, tmp_path / "installed" / "bin")):
        environment = {"PATH": f"{place}:{os.environ['PATH']}", "LIMITKEEPER_DISABLE_COMPILED": "1", "PIP_NO_COMPILE": "1"}
        done = subprocess.run(
            ["sh", "-c", step.replace("/wheels", str(tmp_path / "wheels"))],
            cwd=tmp_path / "src",
            env={**clean, **environment},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        if step == build and "NewConnectionError" in done.stderr:
            pytest.skip("no package index can be reached from here")
        assert done.returncode == 0, done.stderr
    entry = json.loads(steps("ENTRYPOINT")[0])
    settings = dict(one.split("=") for one in shlex.split(steps("ENV")[0]))
    settings["LIMITKEEPER_POLICY"] = str(tmp_path / "image") + settings["LIMITKEEPER_POLICY"]
    serve = [str(tmp_path / "installed" / "bin" / entry[0]), *entry[1:]]
    refused = subprocess.run(serve, env={**clean, **settings}, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "a token is required" in refused.stderr
    check_health(serve, {**clean, **settings, "LIMITKEEPER_TOKEN": "a" * 32}, json.loads(steps("HEALTHCHECK .*?CMD")[0]))


def check_health(serve: list[str], environment: dict[str, str], health: list[str]) -> None:
    """Starts the service on a free loopback port and runs the health check of the container on it."""
    port = free_port()
    environment |= {"LIMITKEEPER_HTTP": f"127.0.0.1:{port}", "LIMITKEEPER_RESP": "off"}
    process = subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: process.poll() is not None or is_open(port))
        asked = [sys.executable, *(one.replace("7070", str(port)).replace("timeout=1", "timeout=30") for one in health[1:])]
        assert subprocess.run(asked, timeout=60, check=False).returncode == 0
    finally:
        process.terminate()
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert limitkeeper.__version__ in printed


def copy(source: Path, target: Path) -> None:
    built = shutil.ignore_patterns("*.so", "*.pyd", "*.c", "*.egg-info", "__pycache__")
    if source.is_dir():
        shutil.copytree(source, target, ignore=built)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
