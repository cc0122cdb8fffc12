"""Audits: comparing predictions with hashes, and the statistics."""

from __future__ import annotations

from typing import Any

from phos.gpu_engine.spec.audit import (
    EXAMPLES_KEPT,
    Audit,
    Comparison,
    Kind,
    Launch,
    Place,
    Range,
    bytes_by_chunk,
    compare,
    merged,
    parameter_values,
    source_of,
)
from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, Field, FieldKind, Parameter, Source

CHUNK = 100


def launch(*predicted: Range, kernel: str = "k", source: str = "ptx", anything: bool = False) -> Launch:
    return Launch(kernel, 1, source, "", anything, predicted, b"")


def test_bytes_are_counted_by_chunk() -> None:
    assert bytes_by_chunk([Range(1, 50, 100), Range(1, 160, 10), Range(1, 400, 100)], CHUNK) == {0: 50, 1: 60, 4: 100}
    assert bytes_by_chunk([Range(1, 0, 0)], CHUNK) == {}
    assert bytes_by_chunk([Range(1, 99, 2)], CHUNK) == {0: 1, 1: 1}


def test_neighbours_are_merged() -> None:
    assert merged(7, [0, 1, 3, 4, 5, 9], CHUNK) == [Range(7, 0, 200), Range(7, 300, 300), Range(7, 900, 100)]
    assert merged(7, [], CHUNK) == []


def test_written_and_predicted_are_compared() -> None:
    before = {1: [1, 2, 3, 4], 2: [5, 6], 3: [7]}
    after = {1: [1, 9, 3, 9], 2: [5, 6], 4: [8]}
    found = compare(launch(Range(1, 150, 100), Range(2, 0, 10)), before, after, CHUNK)
    assert (found.written, found.predicted, found.unchanged) == (2, 3, 2)
    assert (found.predicted_bytes, found.unchanged_bytes) == (110, 60)
    assert (found.wrong, found.wrong_chunks) == ([Range(1, 300, 100)], 1)


def test_what_may_write_anywhere_is_never_wrong() -> None:
    found = compare(launch(anything=True), {1: [1, 2], 2: [3]}, {1: [1, 9], 2: [9]}, CHUNK)
    assert (found.written, found.predicted, found.unchanged, found.unchanged_bytes) == (2, 3, 1, 100)
    assert not found.wrong


def test_sources_have_names() -> None:
    named = [source_of(Kind.KERNEL, int(s), "") for s in Source]
    assert named == ["ptx", "sass", "name", "layout"]
    assert source_of(Kind.KERNEL, 0, "cublasSgemm_v2") == "library"
    assert [source_of(kind, 255, "") for kind in (Kind.GRAPH, Kind.CALL, Kind.UNKNOWN)] == ["graph", "call", "unknown"]
    assert source_of(Kind.KERNEL, 77, "") == "unknown"
    assert source_of(99, 0, "") == "unknown"


def test_parameters_are_shown_by_layout() -> None:
    both = Access.READ | Access.WRITE
    descriptor = AccessDescriptor(
        "k",
        (Parameter(0, 8), Parameter(8, 4), Parameter(16, 24), Parameter(40, 8)),
        (Field(0, 8, both, FieldKind.POINTER),),
        Access.NONE,
        Source.PTX,
    )
    block = (0x7F0000001000).to_bytes(8, "little") + (5).to_bytes(8, "little") + bytes(range(24))
    assert parameter_values(block, descriptor) == [
        "0x7f0000001000",
        "0x5",
        "bytes 0001020304050607 08090a0b0c0d0e0f 1011121314151617",
    ]
    assert parameter_values(block[:12], None) == ["0x7f0000001000", "0x5"]
    assert parameter_values(b"", None) == []


def test_the_first_launches_and_then_some_are_wanted() -> None:
    audit = Audit(3, 4, CHUNK)
    assert [n for n in range(1, 16) if audit.wanted(launch())] == [1, 2, 3, 7, 11, 15]
    assert audit.wanted(launch(kernel="other"))
    none = Audit(0, 0, CHUNK)
    assert not any(none.wanted(launch()) for _ in range(100))
    assert none.report()["kernels"][0]["launches"] == 100


def totals(audit: Audit) -> dict[str, dict[str, Any]]:
    return {row["source"]: row for row in audit.report()["sources"]}


def test_success_is_counted_by_source() -> None:
    audit = Audit(10, 0, CHUNK)
    good = Comparison(written=1, predicted=2, unchanged=1, predicted_bytes=200, unchanged_bytes=100)
    bad = Comparison(written=1, wrong=[Range(1, 0, CHUNK)], wrong_chunks=1)
    for name, source, result in [
        ("a", "ptx", good),
        ("a", "ptx", good),
        ("b", "ptx", bad),
        ("b", "ptx", good),
        ("c", "name", bad),
    ]:
        one = launch(kernel=name, source=source)
        assert audit.wanted(one)
        audit.add(one, result, [Place(0x1000, 0x800, 4096, "cuMemAlloc_v2")] if result is bad else ())
    late = launch(kernel="d", source="layout")
    assert audit.wanted(late)
    audit.skipped(late, "it hangs")
    rows = totals(audit)
    assert list(rows) == ["ptx", "name", "layout"]
    assert (rows["ptx"]["kernels"], rows["ptx"]["kernels_wrong"], rows["ptx"]["success"]) == (2, 1, 0.75)
    assert rows["ptx"]["over_traced"] == 0.5
    assert (rows["name"]["success"], rows["name"]["over_traced"]) == (0, None)
    assert (rows["layout"]["success"], rows["layout"]["kernels_audited"]) == (None, 0)
    report = audit.report()
    assert [k["kernel"] for k in report["kernels"]][:2] == ["c", "b"]  # wrong ones first
    (place,) = report["kernels"][0]["wrong"][0]["written"]
    assert (place["address"], place["allocation"], place["entry_point"]) == ("0x1000", "0x800", "cuMemAlloc_v2")
    assert report["kernels"][-1]["skipped"] == {"it hangs": 1} or report["kernels"][2]["skipped"] == {"it hangs": 1}


def test_examples_of_wrong_guesses_are_limited() -> None:
    audit = Audit(100, 0, CHUNK)
    scattered = Comparison(wrong=[Range(1, i * 200, 100) for i in range(40)], wrong_chunks=40)
    for _ in range(20):
        audit.wanted(launch())
        audit.add(launch(), scattered)
    (row,) = audit.report()["kernels"]
    assert (row["wrong_launches"], row["wrong_chunks"], len(row["wrong"])) == (20, 800, EXAMPLES_KEPT)
    assert (len(row["wrong"][0]["written"]), row["wrong"][0]["more"]) == (16, 24)


def test_endless_kernels_do_not_fill_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr("phos.gpu_engine.spec.audit.KERNELS_KEPT", 3)
    audit = Audit(1, 0, CHUNK)
    assert [audit.wanted(launch(kernel=f"k{n}")) for n in range(5)] == [True, True, True, False, False]
    audit.add(launch(kernel="k4"), Comparison(written=1))
    report = audit.report()
    assert (len(report["kernels"]), report["launches_left_out"]) == (3, 3)
