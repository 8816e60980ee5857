"""The ledger: what is refused, what is counted, and what is on record after a crash."""

from __future__ import annotations

import pytest

from gemmserve_service.errors import QuotaExceeded, StorageQuotaExceeded
from gemmserve_service.store import quotas as quotas_module
from gemmserve_service.store.database.database import Database
from gemmserve_service.store.quotas import Quotas
from gemmserve_service.tenancy.api_keys import Quota

NOON = 20_000 * 86_400 + 43_200.0


class Clock:
    def __init__(self):
        self.now = NOON

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def quotas(clock):
    """An owner "a" with every quota, and "b" with none."""
    limits = {"a": Quota(stored_bytes=100, inflight_bytes=50, queued_jobs=2, device_seconds_per_day=10)}
    return Quotas(lambda owner: limits.get(owner, Quota()), clock=clock)


def test_stored_bytes_up_to_the_limit_and_no_further(quotas):
    quotas.check_bytes("a", 100, scratch=False)
    quotas.charge_bytes("a", 60, scratch=False)
    quotas.check_bytes("a", 40, scratch=False)
    with pytest.raises(StorageQuotaExceeded) as caught:
        quotas.check_bytes("a", 41, scratch=False)
    assert (caught.value.status, caught.value.slug, caught.value.retry_after_s) == (507, "quota-exceeded", None)
    assert caught.value.extra == {"quota": "stored_bytes", "limit": 100, "used": 60}
    quotas.check_bytes("b", 1 << 60, scratch=False)
    quotas.charge_bytes("a", -60, scratch=False)
    assert quotas.stored_bytes("a") == 0
    assert quotas.owners() == set()


def test_bodies_and_scratch_share_one_quota(quotas):
    with quotas.in_flight("a", 20):
        quotas.check_bytes("a", 30, scratch=True)
        quotas.charge_bytes("a", 30, scratch=True)
        with pytest.raises(QuotaExceeded) as caught, quotas.in_flight("a", 1):
            pass
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
        assert (quotas.inflight_bytes("a"), quotas.scratch_bytes("a"), quotas.stored_bytes("a")) == (50, 30, 0)
    assert quotas.inflight_bytes("a") == 30


def test_a_body_that_breaks_off_is_counted_no_more(quotas):
    with pytest.raises(ConnectionError), quotas.in_flight("a", 50):
        raise ConnectionError
    with quotas.in_flight("a", 50):
        pass


def test_what_can_never_fit_is_not_worth_another_attempt_soon(quotas):
    with pytest.raises(QuotaExceeded) as caught:
        quotas.check_bytes("a", 51, scratch=True)
    assert caught.value.retry_after_s > 3600


def test_jobs(quotas):
    quotas.check_job("a", 1)
    quotas.check_job("b", 10_000)
    with pytest.raises(QuotaExceeded) as caught:
        quotas.check_job("a", 2, retry_after_s=lambda: 7.0)
    assert caught.value.retry_after_s == 7.0
    assert caught.value.extra["quota"] == "queued_jobs"


def test_device_seconds_until_midnight(quotas, clock):
    quotas.charge_device("a", 9.5)
    quotas.check_job("a", 0)
    quotas.charge_device("a", 0.5)
    with pytest.raises(QuotaExceeded) as caught:
        quotas.check_job("a", 0)
    assert caught.value.retry_after_s == 43_200.0
    assert quotas.resets_at() == NOON + 43_200
    clock.now += 43_200
    quotas.check_job("a", 0)
    assert quotas.device_seconds("a") == 0
    clock.now -= 1  # the clock is set back: yesterday's use is not forgotten
    with pytest.raises(QuotaExceeded):
        quotas.check_job("a", 0)


def test_nobody_in_particular_is_everybody(quotas):
    quotas.charge_bytes("a", 3, scratch=False)
    quotas.charge_bytes("b", 4, scratch=False)
    quotas.charge_device("a", 1)
    quotas.charge_device("b", 2)
    assert (quotas.stored_bytes(""), quotas.device_seconds("")) == (7, 3)


@pytest.fixture
async def database(tmp_path):
    database = Database(tmp_path / "db.sqlite")
    await database.start()
    yield database
    await database.stop()


async def test_device_seconds_are_on_record_before_what_is_written_after(database, clock):
    """A job's end is written after its charge: whoever finds the one finds the other, wherever a kill comes."""
    quotas = Quotas(database=database, clock=clock)
    await quotas.start()
    for _ in range(3):
        quotas.charge_device("a", 1.5)
        await database.write(lambda db: db.execute("SELECT 1"))
        # What another process would find now, had this one been killed.
        other = Quotas(database=database, clock=clock)
        await other.start()
        assert other.device_seconds("a") == quotas.device_seconds("a")


async def test_seconds_that_nobody_is_charged_with_cost_no_commit_anything(database, clock, monkeypatch):
    monkeypatch.setattr(quotas_module, "_FLUSH_S", 3600.0)
    quotas, other = Quotas(database=database, clock=clock), Quotas(database=database, clock=clock)
    await quotas.start()
    quotas.charge_device("", 1.5)
    await database.write(lambda db: db.execute("SELECT 1"))
    await other.start()
    assert other.device_seconds("") == 0.0
    quotas.charge_device("a", 1.0)
    await database.write(lambda db: db.execute("SELECT 1"))
    await other.start()
    assert other.device_seconds("") == 2.5


async def test_one_shot_seconds_are_on_record_soon_and_at_the_end(database, clock, monkeypatch):
    quotas = Quotas(database=database, clock=clock)
    await quotas.start()
    for _ in range(10):
        quotas.charge_device("a", 0.25)
    quotas.stop()
    quotas.stop()
    other = Quotas(database=database, clock=clock)
    await other.start()
    assert other.device_seconds("a") == 2.5


async def test_a_full_disk_loses_no_second(database, clock):
    quotas = Quotas(database=database, clock=clock)
    await quotas.start()
    await database.write(lambda db: db.execute("ALTER TABLE device_use RENAME TO away"))
    quotas.charge_device("a", 1.0)
    await database.write(lambda db: db.execute("SELECT 1"))
    await database.write(lambda db: db.execute("ALTER TABLE away RENAME TO device_use"))
    quotas.charge_device("a", 2.0)
    await database.write(lambda db: db.execute("SELECT 1"))
    other = Quotas(database=database, clock=clock)
    await other.start()
    assert other.device_seconds("a") == 3.0


async def test_a_full_disk_is_told_of_once(database, clock, caplog):
    quotas = Quotas(database=database, clock=clock)
    await quotas.start()
    for count in (1, 2):
        await database.write(lambda db: db.execute("ALTER TABLE device_use RENAME TO away"))
        quotas.charge_device("a", 1.0)
        for _ in range(5):
            await database.write(lambda db: db.execute("SELECT 1"))
        assert caplog.text.count("device use could not be recorded") == count
        await database.write(lambda db: db.execute("ALTER TABLE away RENAME TO device_use"))
        await database.write(lambda db: db.execute("SELECT 1"))


async def test_old_days_are_forgotten(database, clock):
    quotas = Quotas(database=database, clock=clock)
    await quotas.start()
    quotas.charge_device("a", 1.0)
    await database.write(lambda db: db.execute("SELECT 1"))
    clock.now += 401 * 86_400
    other = Quotas(database=database, clock=clock)
    await other.start()
    (rows,) = await database.read(lambda db: db.execute("SELECT count(*) FROM device_use").fetchone())
    assert rows == 0
