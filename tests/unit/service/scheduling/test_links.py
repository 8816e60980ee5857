"""Rates from the store to devices: of a probe, of known devices, of none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_kernels.planning.rates import Way, shipped
from gemmserve_kernels.problem.errors import ParameterInvalid
from gemmserve_service.executor.port import NodeLink, Worker, spec_adapter
from gemmserve_service.executor.protocol import Hello
from gemmserve_service.scheduling.links import DEFAULT_LINK, DEFAULT_RATE, Links


def worker(spec: DeviceSpec) -> Worker:
    found = Worker("w")
    fields = spec_adapter().dump_python(spec, mode="json")
    found.greeted(Hello(worker="w", pid=1, spec=fields, verified_error=0.0))
    return found


def test_known_devices_have_the_rate_that_was_measured() -> None:
    assert Links().rate(worker(KNOWN["H200"])) == shipped("nvidia-h200").pageable.up


def test_nothing_is_known_of_others() -> None:
    links = Links()
    for spec in (KNOWN["MI300X"], DeviceSpec.cpu()):
        assert links.rate(worker(spec)) == DEFAULT_RATE
    assert links.rate(Worker("not yet there")) == DEFAULT_RATE


@pytest.mark.parametrize("device", ["H200", "MI300X"])
def test_a_probe_of_this_host_comes_first(device, tmp_path) -> None:
    found = replace(shipped(), spec=KNOWN[device], pageable=Way(3e9, 2e9))
    (tmp_path / "probe.json").write_text(json.dumps(found.document()))
    links = Links(tmp_path / "probe.json")
    assert links.rate(worker(KNOWN[device])) == links.rate(worker(KNOWN[device])) == 3e9
    assert links.rate(worker(KNOWN["A100"])) == DEFAULT_RATE


def test_a_probe_of_a_cpu_says_nothing_of_copies(tmp_path) -> None:
    document = shipped().document() | {"pinned": None, "pageable": None}
    document["spec"] |= spec_adapter().dump_python(DeviceSpec.cpu(), mode="json")
    (tmp_path / "probe.json").write_text(json.dumps(document))
    assert Links(tmp_path / "probe.json").rate(worker(DeviceSpec.cpu())) == DEFAULT_RATE


def test_what_is_no_probe(tmp_path) -> None:
    (tmp_path / "probe.json").write_text("{}")
    with pytest.raises(ParameterInvalid):
        Links(tmp_path / "probe.json")


def test_of_a_worker_that_joined_the_link_counts_too() -> None:
    """What crosses it is whole on its host before it goes to the device: the times add up."""
    links, far = Links(), worker(KNOWN["H200"])
    near = links.rate(far)
    far.link = NodeLink("node", "10.0.0.1", None, 0)
    assert 1 / links.rate(far) == pytest.approx(1 / near + 1 / DEFAULT_LINK)
    far.link.bytes_s = 5e9
    assert 1 / links.rate(far) == pytest.approx(1 / near + 1 / 5e9)
    far.link.bytes_s = 1e30
    assert links.rate(far) == pytest.approx(near)
