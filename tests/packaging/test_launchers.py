"""Manifests, batch script and compose profile that start workers elsewhere say what the code says."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from gemmserve_service.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SBATCH = ROOT / "deploy/slurm/worker.sbatch"


def documents(name):
    """The documents of a manifest by kind and name."""
    loaded = yaml.safe_load_all((ROOT / "deploy/k8s" / name).read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in loaded}


WORKERS = documents("workers.yaml")
KUBERAY = documents("kuberay.yaml")
RAY_CLUSTER = "gemmserve-ray"
RAY = KUBERAY["RayCluster", RAY_CLUSTER]["spec"]
FRONTS = [each["StatefulSet", "gemmserve-front"]["spec"]["template"]["spec"] for each in (WORKERS, KUBERAY)]
GROUPS = [RAY["headGroupSpec"], *RAY["workerGroupSpecs"]]


def environment(container):
    """Plain values of a container's variables."""
    return {each["name"]: each.get("value") for each in container.get("env", ())}


def settings_of(variables):
    """Settings among variables; every GEMMSERVE_ variable has to be one."""
    return {name.removeprefix("GEMMSERVE_").lower(): value for name, value in variables.items()
            if name.startswith("GEMMSERVE_")}  # fmt: skip


def images():
    """Targets of the Dockerfile."""
    return set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))


# -- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("front", FRONTS, ids=["workers", "kuberay"])
def test_a_front_has_no_device_and_a_port_with_tls(front):
    (container,) = front["containers"]
    given = settings_of(environment(container))
    assert set(given) <= set(Settings.model_fields) | {"join_host", "join_port"}
    assert given["device"] == "none"
    assert given["join_port"] == "8443"
    assert given["tls_certificate"]
    assert given["tls_key"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        "data", *(volume["name"] for volume in front["volumes"])
    }  # fmt: skip


@pytest.mark.parametrize("manifest", [WORKERS, KUBERAY], ids=["workers", "kuberay"])
def test_a_manifest_has_the_service_that_its_pods_look_for(manifest):
    """Applied alone, as its first lines and the docs say."""
    front = manifest["StatefulSet", "gemmserve-front"]["spec"]
    service = manifest["Service", front["serviceName"]]["spec"]
    assert service["selector"] == front["template"]["metadata"]["labels"]
    ports = {port["name"] for port in front["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {port["targetPort"] for port in service["ports"]}
    urls = re.findall(r"https://([a-z-]+)\.gemmserve\.svc:8443", yaml.safe_dump_all(manifest.values()))
    assert set(urls) == {front["serviceName"]}


@pytest.mark.parametrize("manifest", [WORKERS, KUBERAY], ids=["workers", "kuberay"])
def test_clients_and_metrics_reach_the_front_and_workers_join(manifest):
    (policy,) = [
        each["spec"]
        for (kind, _), each in manifest.items()
        if kind == "NetworkPolicy"
        and each["spec"]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "gemmserve-front"}
    ]
    rules = {
        rule["ports"][0]["port"] if "ports" in rule else "all": rule.get("from", "anybody")
        for rule in policy["ingress"]
    }
    assert rules[8000] == "anybody"
    assert rules[9464] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    (workers,) = rules.get(8443) or rules["all"]
    assert workers["podSelector"]["matchLabels"] in (
        {"app.kubernetes.io/name": "gemmserve-worker"},
        {"ray.io/cluster": RAY_CLUSTER},
    )


def test_a_worker_has_a_gpu_and_joins_by_the_service_with_a_token_from_a_file():
    spec = WORKERS["Deployment", "gemmserve-worker"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    command, *flags = container["args"]
    assert command == "worker"
    flags = dict(flag.split("=", 1) for flag in flags)
    service = WORKERS["Service", "gemmserve-front"]["metadata"]
    assert flags["--join"] == f"https://{service['name']}.{service['namespace']}.svc:8443"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert flags["--token-file"].rpartition("/")[0] in mounts
    assert flags["--device"] == "cuda:0"
    assert flags["--name"] == "$(POD_NAME)", "two of one name would drive each other out"
    assert set(mounts.values()) == {volume["name"] for volume in spec["volumes"]}
    assert spec["terminationGracePeriodSeconds"] > Settings().drain_s


def test_workers_are_scaled_by_a_metric_that_there_is():
    spec = WORKERS["HorizontalPodAutoscaler", "gemmserve-worker"]["spec"]
    (metric,) = spec["metrics"]
    name = metric["object"]["metric"]["name"].removeprefix("gemmserve_")
    assert f'"{name}"' in (ROOT / "service/gemmserve_service/http/metrics/metrics.py").read_text()
    described = metric["object"]["describedObject"]
    assert (described["kind"], described["name"]) in WORKERS
    target = spec["scaleTargetRef"]
    assert (target["kind"], target["name"]) in WORKERS
    assert "replicas" not in WORKERS["Deployment", "gemmserve-worker"]["spec"]


# -- KubeRay ----------------------------------------------------------------------------------------------------------


def test_the_cluster_has_fields_of_kuberays():
    """Fields of RayClusterSpec (ray.io/v1): https://docs.ray.io/en/master/cluster/kubernetes/references/api.html."""
    known = {"rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "gcsFaultToleranceOptions",
             "headGroupSpec", "workerGroupSpecs"}  # fmt: skip
    assert set(RAY) == known
    assert set(RAY["headGroupSpec"]) == {"rayStartParams", "template"}
    for group in RAY["workerGroupSpecs"]:
        assert set(group) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert set(RAY["autoscalerOptions"]) == {"idleTimeoutSeconds"}


@pytest.mark.parametrize("group", GROUPS, ids=["head", "gpu"])
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_the_pods_of_the_cluster_are_of_their_schema(group, version):
    template = {"metadata": {"labels": {"a": "b"}}, **group["template"]}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"},
                  "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template}}  # fmt: skip
    kubernetes_validate.validate(deployment, version, strict=True)


def test_rays_token_is_asked_for():
    assert RAY["authOptions"] == {"mode": "token", "secretName": "gemmserve-ray-token"}
    variables = FRONTS[1]["containers"][0]["env"]
    given = {each["name"]: each for each in variables}
    assert given["RAY_AUTH_MODE"]["value"] == "token"
    assert given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == RAY["authOptions"]["secretName"]
    assert COMPOSE["x-ray"]["environment"]["RAY_AUTH_MODE"] == "token"
    assert COMPOSE["services"]["ray"]["environment"]["RAY_AUTH_MODE"] == "token"


def test_the_heads_tables_are_in_redis():
    options = RAY["gcsFaultToleranceOptions"]
    assert options["redisAddress"]
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]


def test_a_dead_node_is_known_in_seconds():
    heads = [environment(RAY["headGroupSpec"]["template"]["spec"]["containers"][0]),
             COMPOSE["services"]["ray-head"]["environment"]]  # fmt: skip
    for head in heads:
        given = {name.removeprefix("RAY_health_check_"): int(value) for name, value in head.items() if "health" in name}
        assert given == {"initial_delay_ms": 500, "period_ms": 500, "timeout_ms": 1000, "failure_threshold": 4}


def test_nodes_outlive_a_head_that_is_gone_for_minutes():
    nodes = [environment(group["template"]["spec"]["containers"][0]) for group in GROUPS]
    nodes += [environment(FRONTS[1]["containers"][0]), COMPOSE["x-ray"]["environment"],
              COMPOSE["services"]["ray"]["environment"], COMPOSE["services"]["ray-head"]["environment"]]  # fmt: skip
    assert {int(node["RAY_gcs_rpc_server_reconnect_timeout_s"]) for node in nodes} == {1800}


def test_workers_are_as_nice_as_other_processes():
    (group,) = RAY["workerGroupSpecs"]
    nodes = [environment(group["template"]["spec"]["containers"][0]), COMPOSE["services"]["ray-node"]["environment"]]
    assert [node["RAY_worker_niceness"] for node in nodes] == ["0", "0"]


def test_a_node_has_the_gpu_that_it_says():
    (group,) = RAY["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(group["rayStartParams"]["num-gpus"]) == 1
    most = environment(FRONTS[1]["containers"][0])["GEMMSERVE_RAY_MAX_WORKERS"]
    assert int(most) == group["maxReplicas"]


def test_versions_of_ray_agree():
    text = (ROOT / "pyproject.toml").read_text()
    low, high = re.search(r'^ray = \["ray>=([\d.]+),<([\d.]+)"\]', text, re.MULTILINE).groups()
    version = tuple(map(int, RAY["rayVersion"].split(".")))
    assert tuple(map(int, low.split("."))) <= version < tuple(map(int, high.split(".")))
    for file in (".ci/constraints.txt", "deploy/locks/ray.txt"):
        assert re.search(rf"^ray=={re.escape(RAY['rayVersion'])}\b", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_options_of_ray_start_exist():
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"--([a-z-]+)", done.stdout))
    used = {name for group in GROUPS for name in group["rayStartParams"]}
    for text in (DOCKERFILE, (ROOT / "docker-compose.yml").read_text(), (ROOT / "deploy/k8s/kuberay.yaml").read_text()):
        for line in re.findall(r"ray start ((?:.|\n\s+--)*)", text):
            used |= set(re.findall(r"--([a-z-]+)", line))
    assert used
    assert used <= known


def test_images_are_targets_of_the_dockerfile():
    specs = [*FRONTS, WORKERS["Deployment", "gemmserve-worker"]["spec"]["template"]["spec"]]
    specs += [group["template"]["spec"] for group in GROUPS]
    for spec in specs:
        for container in spec["containers"]:
            name, _, target = container["image"].partition(":")
            assert name == "gemmserve"
            assert target in images()


# -- compose ----------------------------------------------------------------------------------------------------------


def test_rays_nodes_in_compose_publish_nothing_and_are_confined():
    for name in ("ray-head", "ray-node"):
        service = COMPOSE["services"][name]
        assert service["profiles"] == ["ray"]
        assert "ports" not in service
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["healthcheck"] == {"disable": True}
    service = COMPOSE["services"]["ray"]
    assert service["profiles"] == ["ray"]
    assert service["build"]["target"] == "ray"
    assert service["image"] == COMPOSE["x-ray"]["image"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    own = dict(service["environment"])
    assert set(settings_of(own)) <= set(Settings.model_fields) | {"join_host", "join_port", "join_insecure"}
    assert set(service["secrets"]) <= set(COMPOSE["secrets"])


# -- Slurm ------------------------------------------------------------------------------------------------------------


def run_batch(tmp_path, **variables):
    """What `srun` is called with, by a stand-in that prints its arguments."""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o700)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    return subprocess.run(["bash", SBATCH], env=given, capture_output=True, text=True, check=False)


JOB = {"GEMMSERVE_JOIN": "https://f:8443", "GEMMSERVE_JOIN_TOKEN_FILE": "/home/me/my token", "SLURM_JOB_ID": "7"}


def test_the_batch_script_joins(tmp_path):
    done = run_batch(tmp_path, **JOB)
    assert done.returncode == 0, done.stderr
    srun, _, command = done.stdout.partition("gemmserve\n")
    assert srun == "--kill-on-bad-exit=1\n"
    parser = argparse.ArgumentParser()
    for flag in ("--join", "--token-file", "--device", "--name"):
        parser.add_argument(flag)
    parser.add_argument("command")
    read = parser.parse_args(command.splitlines())
    assert (read.command, read.join, read.token_file) == ("worker", "https://f:8443", "/home/me/my token")
    assert (read.device, read.name) == ("cuda:0", "slurm-7-0")


def test_tasks_of_an_array_have_names_of_their_own(tmp_path):
    names = {
        run_batch(tmp_path, **JOB, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID=task).stdout.splitlines()[-1]
        for task in "012"
    }
    assert names == {"slurm-7-0", "slurm-7-1", "slurm-7-2"}


@pytest.mark.parametrize("lacking", ["GEMMSERVE_JOIN", "GEMMSERVE_JOIN_TOKEN_FILE"])
def test_the_batch_script_says_what_it_lacks(tmp_path, lacking):
    done = run_batch(tmp_path, **{name: value for name, value in JOB.items() if name != lacking})
    assert done.returncode != 0
    assert lacking in done.stderr


def test_directives_come_before_the_first_command():
    lines = SBATCH.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives
    assert max(directives) < first, "Slurm reads none after it"
    subprocess.run(["bash", "-n", SBATCH], check=True)
