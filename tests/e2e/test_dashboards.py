"""Alerts and dashboard ask for what the server gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from live_server import LiveServer
from prometheus_client.parser import text_string_to_metric_families

from gemmserve import Client

ROOT = Path(__file__).parents[2]
_METRIC = re.compile(r"\bgemmserve_\w+")
_LABELS = re.compile(r"\b(gemmserve_\w+)\{([^}]*)\}")


def alerts():
    text = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    return [rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def panels():
    return json.loads((ROOT / "deploy/grafana/dashboards/gemmserve.json").read_text())["panels"]


def dashboard():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """Every name that /metrics can give, and the labels of those that gave something, after a product and an error."""
    environment = {"GEMMSERVE_TRANSFER_PROCESSES": "1"}
    with (
        LiveServer(data_dir=tmp_path_factory.mktemp("data"), environment=environment) as server,
        Client(server.url) as client,
    ):
        eye = client.put(np.eye(8, dtype=np.complex64))
        client.submit("gemm", eye, eye, verify=True).wait(60)
        client.gemm(np.eye(8), np.eye(8))
        with server.http() as http:
            http.get("/v1/arrays/none")
            families = list(text_string_to_metric_families(http.get("/metrics").text))
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    names = {family.name + suffix for family in families for suffix in suffixes[family.type]}
    labels = {}
    for family in families:
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return names, labels


@pytest.mark.parametrize("expressions", [alerts, dashboard])
def test_every_metric_that_is_asked_for_is_given(metrics, expressions):
    names, _ = metrics
    asked = {name for text in expressions() for name in _METRIC.findall(text)}
    assert asked
    assert not asked - names


@pytest.mark.parametrize("expressions", [alerts, dashboard])
def test_every_label_that_is_asked_for_is_given(metrics, expressions):
    _, labels = metrics
    scraped = {"instance", "job"}  # Prometheus adds them
    for text in expressions():
        for name, selector in _LABELS.findall(text):
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) - scraped
            assert asked <= labels.get(name, asked), f"{name}: {asked}"


@pytest.mark.parametrize("expressions", [alerts, dashboard])
def test_every_label_that_is_grouped_by_is_given(metrics, expressions):
    """Labels of expressions with one metric."""
    _, labels = metrics
    for text in expressions():
        (name, *others) = dict.fromkeys(_METRIC.findall(text)) or [""]
        grouped = {label.strip() for part in re.findall(r"by \(([^)]*)\)", text) for label in part.split(",")}
        if not others and name in labels:
            assert grouped - {"instance"} <= labels[name], text


def test_the_issues_alerts_are_there():
    text = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    for metric in (
        "gemmserve_queue_depth", "gemmserve_worker_restarts_total", "gemmserve_job_mismatches_total",
        "gemmserve_device_memory_used_bytes", "histogram_quantile(0.99",
    ):  # fmt: skip
        assert metric in text


def test_the_dashboard_finds_its_datasource():
    provisioned = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    uids = {source["uid"] for source in provisioned["datasources"]}
    assert {panel["datasource"]["uid"] for panel in panels()} <= uids
    assert len({panel["id"] for panel in panels()}) == len(panels())
