"""Images, compose and manifests say what the code says. No engine is needed for that; `make containers` has one."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gemmserve_kernels import precompile
from gemmserve_kernels.device.compiler import CACHE_VARIABLE
from gemmserve_kernels.device.shipped_kernels import SEED_VARIABLE
from gemmserve_service.processes import supervisor
from gemmserve_service.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVERS = ("cpu", "cuda", "rocm")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STOP_S = Settings().drain_s + supervisor._KILL_AFTER_S
# What is no setting of the server: the kernels' folders, and what only compose itself reads.
OTHER = {CACHE_VARIABLE, SEED_VARIABLE}
# OpenTelemetry's, which its SDK reads.
TELEMETRY = {"OTEL_EXPORTER_OTLP_ENDPOINT"}


def load(path):
    """A script of this repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- lock files -------------------------------------------------------------------------------------------------------


def locked(name):
    """The packages of a lock file: (requirement with marker, number of hashes) by name."""
    text = (ROOT / "deploy/locks" / f"{name}.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        requirement = Requirement(line.partition(" --hash")[0])
        found.setdefault(canonicalize_name(requirement.name), []).append((requirement, line.count("--hash=sha256:")))
    return found


def pin(found, name, environment):
    """The version of a package under these markers' values, or None."""
    for requirement, _ in found.get(canonicalize_name(name), ()):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            return str(requirement.specifier).removeprefix("==")
    return None


LOCKS = load(ROOT / "tools/lock.py").EXTRAS


@pytest.mark.parametrize("name", sorted(LOCKS))
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_a_lock_satisfies_pyproject(name, python):
    """`make lock` after a change of the requirements, or this fails."""
    found = locked(name)
    environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.1", "extra": ""}
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in LOCKS[name]:
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        version = pin(found, requirement.name, environment)
        assert version is not None, f"deploy/locks/{name}.txt lacks {requirement.name}"
        assert requirement.specifier.contains(version), f"deploy/locks/{name}.txt has {requirement.name} {version}"


@pytest.mark.parametrize("name", [*sorted(LOCKS), "build"])
def test_every_package_is_pinned_by_hashes(name):
    for entries in locked(name).values():
        for requirement, hashes in entries:
            assert re.fullmatch(r"==[^=*]+", str(requirement.specifier)), requirement
            assert hashes > 0, requirement


def test_the_build_lock_holds_the_build_system():
    found = locked("build")
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        version = pin(found, requirement.name, default_environment())
        assert version is not None
        assert requirement.specifier.contains(version)


def test_the_locks_agree():
    """The CUDA image installs its lock over the CPU's: nothing may change version."""
    cpu, cuda = locked("cpu"), locked("cuda13")
    for name, entries in cpu.items():
        assert [str(requirement) for requirement, _ in entries] == [str(requirement) for requirement, _ in cuda[name]]


# -- Dockerfile -------------------------------------------------------------------------------------------------------


def test_hadolint_finds_nothing():
    found = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_dockerfile_builds_with_every_engine():
    """Nothing that wants a frontend from a registry, or a builder newer than Docker 20.10's."""
    assert not re.search(r"^#\s*syntax\s*=", DOCKERFILE, re.MULTILINE | re.IGNORECASE)
    assert "<<" not in DOCKERFILE
    assert "--link" not in DOCKERFILE
    assert "--start-interval" not in DOCKERFILE


def final_stage(target):
    """The instructions of a target and of the stages that it is made from, up to an image from elsewhere."""
    stages = re.split(r"^(?=FROM )", re.sub(r"\\\n", " ", DOCKERFILE), flags=re.MULTILINE)[1:]
    named = {re.match(r"FROM (\S+) AS (\S+)", stage)[2]: stage for stage in stages}
    text = named[target]
    while (parent := re.match(r"FROM (\S+)", text)[1]) in named:
        text = named[parent] + text
        text = re.sub(r"^FROM \S+ AS \S+\n(?=FROM)", "", text)
        if re.match(r"FROM (\S+)", named[parent])[1] not in named:
            break
    return text


@pytest.mark.parametrize("target", SERVERS)
def test_an_image_is_confined(target):
    text = final_stage(target)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001:10001"
    assert "HEALTHCHECK" in text
    assert "gemmserve_service.processes.healthcheck" in text
    assert 'VOLUME ["/var/lib/gemmserve", "/var/cache/gemmserve"]' in text
    assert 'ENTRYPOINT ["gemmserve"]' in text


@pytest.mark.parametrize("target", SERVERS)
def test_an_images_variables_are_settings(target):
    names = set(re.findall(r"\b(GEMMSERVE_\w+)=", final_stage(target)))
    assert names
    assert {name.removeprefix("GEMMSERVE_").lower() for name in names - OTHER} <= set(Settings.model_fields)


def test_kernels_are_compiled_for_known_architectures():
    texts = re.findall(r'ARG (?:ROCM_)?KERNEL_ARCHITECTURES="([^"]+)"', DOCKERFILE)
    assert [arch for text in texts for arch in text.split()] == list(precompile.DEVICES)


# -- compose ----------------------------------------------------------------------------------------------------------


def default(text):
    """A compose value with the defaults of its variables."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", str(text))


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_in_compose(name):
    service = COMPOSE["services"][name]
    assert service["profiles"] == [name]
    assert service["build"]["target"] == name
    assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "open to others without keys"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    names = set(service["environment"]) - TELEMETRY
    assert {name.removeprefix("GEMMSERVE_").lower() for name in names} <= set(Settings.model_fields)


@pytest.mark.parametrize("name", SERVERS)
def test_compose_waits_for_the_drain(name):
    seconds = float(default(COMPOSE["services"][name]["stop_grace_period"]).removesuffix("s"))
    assert seconds > STOP_S
    assert default(COMPOSE["services"][name]["environment"]["GEMMSERVE_DRAIN_S"]) == f"{Settings().drain_s:g}"


def test_devices_are_reserved():
    (reservation,) = COMPOSE["services"]["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert reservation == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert COMPOSE["services"]["rocm"]["devices"] == ["/dev/kfd", "/dev/dri"]


def test_the_defaults_of_compose_are_the_servers():
    for key, value in COMPOSE["x-server"]["environment"].items():
        if key in TELEMETRY:
            assert not default(value)  # no traces
            continue
        name = key.removeprefix("GEMMSERVE_").lower()
        if "${" in str(value):
            given = default(value)
            expected = Settings.model_fields[name].get_default(call_default_factory=True)
            assert given == ("none" if expected is None else f"{expected:g}" if isinstance(expected, float) else
                             str(expected).lower()), key  # fmt: skip


def test_jaeger_takes_what_servers_send():
    service = COMPOSE["services"]["jaeger"]
    assert re.search(r":\d+\.\d+\.\d+$", default(service["image"]))
    (mounted,) = service["volumes"]
    source, target, _ = mounted.split(":")
    assert service["command"] == ["--config", target]
    config = yaml.safe_load((ROOT / source).read_text())
    pipeline = config["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(config[kind])
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    storages = set(config["extensions"]["jaeger_storage"]["backends"])
    assert {config["extensions"]["jaeger_query"]["storage"]["traces"]} == storages
    assert {config["exporters"]["jaeger_storage_exporter"]["trace_storage"]} == storages
    assert config["receivers"]["otlp"]["protocols"]["http"]["endpoint"] == "0.0.0.0:4318"
    assert "http://jaeger:4318" in (ROOT / "docs/operations/tracing.md").read_text()
    (port,) = service["ports"]
    assert default(port) == "127.0.0.1:16686:16686"
    assert config["extensions"]["jaeger_query"]["http"]["endpoint"].endswith(":16686")


def test_the_public_port_wants_keys_and_tls():
    text = (ROOT / "deploy/compose.public.yml").read_text().replace("!override", "")
    public = yaml.safe_load(text)
    for name in SERVERS:
        environment = public["services"][name]["environment"]
        assert environment["GEMMSERVE_ALLOW_UNAUTHENTICATED"] == "false"
        assert {"GEMMSERVE_TLS_CERTIFICATE", "GEMMSERVE_TLS_KEY"} <= set(environment)
    assert all(":?" in secret["file"] for secret in public["secrets"].values())


# -- README -----------------------------------------------------------------------------------------------------------


def test_ci_runs_the_readmes_compose_section():
    """The check takes its commands from the README, and continuous integration runs the check."""
    commands = load(ROOT / "tools/containers/check.py").readme_commands()
    assert commands[0] == "docker compose --profile cpu up --build --wait"
    assert commands[-1] == "docker compose --profile cpu down"
    assert all(shlex.split(command)[0] in {"docker", "python3"} or command.startswith(".venv-") for command in commands)
    ci = (ROOT / ".ci/run").read_text()
    assert ci.index("make containers") < ci.index("make lint") < ci.index("make test")
    recipe = re.search(r"^containers:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert "tools/containers/engine.sh" in recipe
    assert "tools/containers/check.py" in recipe


# -- Kubernetes -------------------------------------------------------------------------------------------------------

MANIFESTS = {
    f"{path.name}:{document['kind']}:{document['metadata']['name']}": document
    for path in sorted((ROOT / "deploy/k8s").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if document["kind"] not in {"Kustomization", "RayCluster"}  # the latter's schema is KubeRay's: test_launchers
}


@pytest.mark.parametrize("name", sorted(MANIFESTS))
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_a_manifest_is_of_its_schema(name, version):
    kubernetes_validate.validate(MANIFESTS[name], version, strict=True)


def test_the_schema_is_looked_at():
    broken = json.loads(json.dumps(MANIFESTS["statefulset.yaml:StatefulSet:gemmserve"]))
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37", strict=True)


def test_the_kustomization_has_every_manifest():
    kustomization = yaml.safe_load((ROOT / "deploy/k8s/kustomization.yaml").read_text())
    files = {path.name for path in (ROOT / "deploy/k8s").glob("*.yaml")} - {"kustomization.yaml"}
    files -= {"workers.yaml", "kuberay.yaml"}  # in its place
    assert set(kustomization["resources"]) == files


def test_a_pod_is_one_gpu_one_volume_and_its_probes():
    pod = MANIFESTS["statefulset.yaml:StatefulSet:gemmserve"]["spec"]
    spec = pod["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert [claim["metadata"]["name"] for claim in pod["volumeClaimTemplates"]] == ["data"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        "data", *(volume["name"] for volume in spec["volumes"])
    }  # fmt: skip
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert spec["terminationGracePeriodSeconds"] > STOP_S + 5
    names = {variable["name"].removeprefix("GEMMSERVE_").lower() for variable in container["env"]}
    assert names <= set(Settings.model_fields)
    assert spec["securityContext"]["runAsUser"] == 10001
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": Settings().port, "metrics": 9464}
