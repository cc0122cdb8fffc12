"""The table of descriptors: what the frontend's C sees is what was packed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phos.gpu_engine.spec import table
from phos.gpu_engine.spec.cache import decode, encode
from phos.gpu_engine.spec.descriptor import (
    Access,
    AccessDescriptor,
    Field,
    FieldKind,
    Parameter,
    Source,
    from_layout,
)
from phos.gpu_engine.spec.errors import SpecError

FRONTEND = Path(__file__).resolve().parents[2] / "frontend"

NUMBERS = st.integers(0, (1 << 31) - 1)
PARAMETERS = st.builds(Parameter, NUMBERS, NUMBERS)
FIELDS = st.builds(Field, NUMBERS, NUMBERS, st.sampled_from([Access(n) for n in range(4)]), st.sampled_from(FieldKind))
DESCRIPTORS = st.builds(
    AccessDescriptor,
    st.text(max_size=12),
    st.lists(PARAMETERS, max_size=4).map(tuple),
    st.lists(FIELDS, max_size=4).map(tuple),
    st.sampled_from([Access(n) for n in range(4)]),
    st.sampled_from(Source),
    st.booleans(),
)
ROWS = st.lists(st.tuples(st.integers(0, (1 << 64) - 1), DESCRIPTORS), max_size=8)

READER = r"""
#include "access_table.h"
#include <stdio.h>
#include <stdlib.h>
int main(void) {
    struct phos_access_header header;
    if (fread(&header, sizeof header, 1, stdin) != 1 || header.magic != PHOS_ACCESS_MAGIC) return 1;
    struct phos_access_kernel *kernels = calloc(header.kernels + 1, sizeof *kernels);
    struct phos_access_parameter *parameters = calloc(header.parameters + 1, sizeof *parameters);
    struct phos_access_field *fields = calloc(header.fields + 1, sizeof *fields);
    if (fread(kernels, sizeof *kernels, header.kernels, stdin) != header.kernels) return 2;
    if (fread(parameters, sizeof *parameters, header.parameters, stdin) != header.parameters) return 3;
    if (fread(fields, sizeof *fields, header.fields, stdin) != header.fields || getchar() != EOF) return 4;
    for (unsigned k = 0; k < header.kernels; k++) {
        const struct phos_access_kernel *kernel = &kernels[k];
        printf("%llu %llx %u %u %u %u;", (unsigned long long)kernel->module, (unsigned long long)kernel->name_hash,
               kernel->block_size, kernel->indirect, kernel->source, kernel->guessed);
        for (unsigned p = 0; p < kernel->parameters; p++)
            {
            const struct phos_access_parameter *parameter = &parameters[kernel->first_parameter + p];
            printf(" %u+%u", parameter->offset, parameter->size);
        }
        printf(";");
        for (unsigned f = 0; f < kernel->fields; f++) {
            const struct phos_access_field *field = &fields[kernel->first_field + f];
            printf(" %u+%u:%u:%u", field->offset, field->size, field->access, field->kind);
        }
        printf("\n");
    }
}
"""


def without_name(found: AccessDescriptor) -> tuple[object, ...]:
    return (found.parameters, found.fields, found.indirect, found.source, found.guessed)


@given(ROWS)
def test_what_is_packed_is_unpacked(rows: list[table.Row]) -> None:
    expected = {(module, table.name_hash(found.kernel)): without_name(found) for module, found in rows}
    found = table.unpack(table.pack(rows))
    assert {(module, hashed): without_name(item) for module, hashed, item in found} == expected
    order = [(module, hashed) for module, hashed, _ in found]
    assert order == sorted(expected)


def test_hashes_are_fnv_1a() -> None:
    # The reference values of the function's authors (isthe.com/chongo/tech/comp/fnv).
    assert table.name_hash("") == 0xCBF29CE484222325
    assert table.name_hash("a") == 0xAF63DC4C8601EC8C
    assert table.name_hash("foobar") == 0x85944171F73967E8


def test_kernels_that_do_not_fit_are_left_out() -> None:
    rows = [(1, from_layout("huge", (Parameter(1 << 32, 8),))), (1, from_layout("fine", (Parameter(0, 8),)))]
    assert [hashed for _, hashed, _ in table.unpack(table.pack(rows))] == [table.name_hash("fine")]


@pytest.mark.parametrize("damage", [lambda t: b"", lambda t: t[:-1], lambda t: t + b"\0", lambda t: b"X" + t[1:]])
def test_damaged_tables_are_refused(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(SpecError):
        table.unpack(damage(table.pack([(1, from_layout("k", (Parameter(0, 8),)))])))


@given(DESCRIPTORS)
def test_the_cache_s_form_keeps_everything(found: AccessDescriptor) -> None:
    assert decode(encode(found)) == found


@pytest.mark.parametrize(
    "wrong",
    [None, [], 7, ["k", [], [], 0, 0], ["k", [[0, -1]], [], 0, 0, 0], ["k", [], [], 0, 9, 0], [5, [], [], 0, 0, 0]],
)
def test_the_cache_s_form_is_checked(wrong: object) -> None:
    with pytest.raises(SpecError):
        decode(wrong)


def test_c_reads_the_same(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("There is no C compiler")
    (tmp_path / "reader.c").write_text(READER)
    reader = tmp_path / "reader"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{FRONTEND}"]
    subprocess.run([compiler, *flags, str(tmp_path / "reader.c"), "-o", str(reader)], check=True)
    rows = [
        (
            7,
            AccessDescriptor(
                "first",
                (Parameter(0, 8), Parameter(8, 24), Parameter(64, 128)),
                (
                    Field(0, 8, Access.READ, FieldKind.POINTER),
                    Field(8, 24, Access.READ | Access.WRITE, FieldKind.SCAN),
                    Field(64, 128, Access.WRITE, FieldKind.TENSOR_MAP),
                ),
                Access.READ,
                Source.SASS,
                guessed=True,
            ),
        ),
        (1 << 63, from_layout("second", (Parameter(0, 4), Parameter(8, 8)))),
        (7, from_layout("third", ())),
    ]
    printed = subprocess.run([str(reader)], input=table.pack(rows), capture_output=True, check=True).stdout.decode()
    expected = []
    for module, found in sorted(rows, key=lambda row: (row[0], table.name_hash(row[1].kernel))):
        numbers = (found.block_size, int(found.indirect), int(found.source), int(found.guessed))
        head = f"{module} {table.name_hash(found.kernel):x} " + " ".join(map(str, numbers)) + ";"
        parameters = "".join(f" {p.offset}+{p.size}" for p in found.parameters)
        fields = "".join(f" {f.offset}+{f.size}:{int(f.access)}:{int(f.kind)}" for f in found.fields)
        expected.append(f"{head}{parameters};{fields}")
    assert printed.splitlines() == expected
