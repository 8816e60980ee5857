"""Findings on the tier: it answers, or why it does not."""

from __future__ import annotations

import pytest
from s3_stand_in import BUCKET, S3StandIn

pytest.importorskip("obstore", reason="the extra tier is not installed")

from gemmserve_service.processes.doctor.tier import tier
from gemmserve_service.settings import Settings
from gemmserve_service.store.tier.objects import Objects


def test_nothing_without_one(tmp_path):
    assert list(tier(Settings(data_dir=tmp_path))) == []


def test_a_tier_that_answers(tmp_path):
    address = (tmp_path / "tier").as_uri()
    (finding,) = tier(Settings(data_dir=tmp_path, tier=address))
    assert (finding.level, finding.subject) == ("note", "tier")
    (finding,) = tier(Settings(data_dir=tmp_path, tier=address, max_store_bytes=1))
    assert finding.level == "ok"
    assert "nothing yet" in finding.text
    Objects(address).claim("that one", adopt=False)
    (finding,) = tier(Settings(data_dir=tmp_path, tier=address, max_store_bytes=1))
    assert "that one" in finding.text


def test_a_tier_that_refuses(tmp_path, monkeypatch):
    with S3StandIn() as s3:
        s3.down = True
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        (finding,) = tier(Settings(data_dir=tmp_path, tier=f"s3://{BUCKET}/prefix", max_store_bytes=1))
    assert finding.level == "error"
    assert "no-secret-of-anybody" not in finding.text
