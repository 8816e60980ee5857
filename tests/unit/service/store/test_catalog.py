"""Catalog: what has a name and labels is found by them, whatever was hidden and shown in between."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store.catalog import Catalog
from gemmserve_service.store.record import NO_TAGS, Record, Tags

NAMES = st.sampled_from([None, "a", "b"])
LABELS = st.dictionaries(st.sampled_from(["run", "a", "step"]), st.sampled_from(["", "a", "7"]), max_size=3)
OWNERS = st.sampled_from(["", "alice", "bob"])


def record(number: int, owner: str, name: str | None, labels: dict[str, str]) -> Record:
    info = ArrayInfo(
        id=f"arr_{number:026d}", dtype="float32", shape=(1,), nbytes=4, created_at=datetime.now(UTC), name=name,
        labels=labels, owner=owner,
    )  # fmt: skip
    return Record(info, None)


@given(
    made=st.lists(st.tuples(OWNERS, NAMES, LABELS), max_size=12),
    hidden=st.sets(st.integers(0, 11)),
    asked=st.tuples(OWNERS, NAMES, LABELS),
    limit=st.integers(1, 4),
)
def test_pages_of_what_is_asked_for_have_all_of_it_once(made, hidden, asked, limit):
    catalog = Catalog()
    records = [record(number, *each) for number, each in enumerate(made)]
    for each in records:
        catalog.add(each)
    for number in hidden & set(range(len(records))):
        catalog.hide(records[number], "deleted")
    owner, name, labels = asked
    tags = Tags(name, labels)
    expected = [
        each.info.id
        for number, each in enumerate(records)
        if number not in hidden
        and owner in {"", each.info.owner}
        and name in {None, each.info.name}
        and labels.items() <= each.info.labels.items()
    ]
    found: list[str] = []
    cursor = None
    while True:
        page, cursor = catalog.page(limit, cursor, owner, tags)
        assert len(page) <= limit
        found += [info.id for info in page]
        if cursor is None:
            break
    assert found == expected[::-1]
    assert [each for each in catalog.ids(owner, tags) if catalog.matching(each, tags)] == expected


def test_nothing_is_left_of_what_was_hidden():
    catalog = Catalog()
    records = [record(number, "alice", "a", {"run": "7"}) for number in range(3)]
    for each in records:
        catalog.add(each)
    for each in records:
        catalog.hide(each, "expired")
    assert catalog._tagged == {}


def test_tags_of_several_results():
    tags = Tags("power", {"run": "7"})
    assert tags.part("d", single=True) is tags
    assert tags.part("sum", single=False) == Tags("power.sum", {"run": "7"})
    assert Tags(None, {"run": "7"}).part("sum", single=False) == Tags(None, {"run": "7"})
    assert [bool(each) for each in (NO_TAGS, tags, Tags("a"), Tags(None, {"a": ""}))] == [False, True, True, True]
