"""Mangled names: what is read off them, against what c++filt and the compiler say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from spec_build import compiled

from phos.gpu_engine.spec import cubin, mangled, mangled_types, names
from phos.gpu_engine.spec.descriptor import Access, FieldKind, Parameter, Source
from phos.gpu_engine.spec.errors import SpecError

SIZES = {"r": 8, "w": 8, "s": 16, "S": 4, "i": 4, "l": 8, "d": 8, "c": 1, "f": 4, "p": 8}
"""Sizes of the parameters below: r read pointer, w written pointer, s struct, S small struct, p pointer to code."""

ELEMENTWISE = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4EZZZNS0_16sqrt_kernel_cudaERNS_18TensorIteratorBaseE"
    "ENKUlvE_clEvENKUlvE0_clEvEUlfE_St5arrayIPcLm2EEEEviT0_T1_"
)
REDUCE = (
    "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_14func_wrapper_tIfZNS0_11sum_functorIfffEclERNS_"
    "14TensorIteratorEEUlffE_EEjfLi4ELi4EEEEEvT1_"
)
MULTI_TENSOR = (
    "_ZN2at6native39_GLOBAL__N__1234abcd_7_file_cu_1234abcd25multi_tensor_apply_kernelINS1_18TensorListMetadataILi1EEENS1_"
    "11CopyFunctorIffLi2ELi1ELi1EEEJNS0_4CopyIffEEEEEvT_T0_DpT1_"
)
EXPECTED = [
    ("_Z3addPKfS0_Pfi", "rrwi"),
    ("_Z4moveRA4_KfRA4_f", "rw"),
    ("_Z4packIJPKfPfiEEvDpT_", "rwi"),
    ("_Z4packIJfdEEvDpPKT_", "rr"),
    ("_Z4packIJEEviDpT_", "i"),
    ("_Z4bothIKfEvPT_S2_", "rr"),
    ("_Z5chainPKPfPKPKfPPPi", "rrw"),
    ("_Z8functionPFvPiES_MS0_FvvE", None),
    ("_Z4callPFvPiEl", "pl"),
    ("_ZN12_GLOBAL__N_15innerEPVKdPVd", "rw"),
    ("_ZL6staticPrKi", None),
    ("_Z5plainPKfPfi4PairPKS2_", "rwisr"),
    (ELEMENTWISE, "iSs"),
    (REDUCE, "s"),
    (MULTI_TENSOR, "sSS"),
    ("_Z10noargumentv", ""),
    ("_ZN3cub17CUB_200700_900_NS6detail8for_eachL13static_kernelINS1_15policy_hub_500E1lFvPiEEEvT0_T1_", None),
    ("_ZSt4fillIPKfEvT_S2_", "rr"),
]


def shape(found: list[mangled_types.Type]) -> str:
    """One letter a parameter, like in SIZES; structs are 's' whatever their size."""
    letters = []
    for item in found:
        plain, _ = names._unqualified(item)
        if isinstance(plain, mangled_types.Pointer):
            target, const = names._target(plain)
            letters.append("p" if isinstance(target, mangled_types.Code) else "r" if const else "w")
        elif isinstance(plain, mangled_types.Builtin):
            letters.append(plain.code)
        else:
            letters.append("s")
    return "".join(letters)


@pytest.mark.parametrize(("name", "expected"), [case for case in EXPECTED if case[1] is not None])
def test_shapes(name: str, expected: str) -> None:
    assert shape(mangled.parameter_types(name)) == expected.replace("S", "s")


@pytest.mark.parametrize(
    "name",
    ["kernel", "", "_Z", "_Z3ab", "_Z3fooS_", "_Z3fooS9_", "_ZN3fooE", "_Z3foo", "_Z3fooPQ", "_Z3fooDpT_", "_Z3fooii)"],
)
def test_what_is_no_functions_name_is_refused(name: str) -> None:
    with pytest.raises(SpecError):
        mangled.parameter_types(name)


@pytest.mark.parametrize("name", ["_Z1f" + "P" * 5000 + "i", "_Z1f" + "N1a" * 3000, "_Z1f1aI" + "S_I" * 900 + "i"])
def test_depth_and_length_are_bounded(name: str) -> None:
    with pytest.raises(SpecError):
        mangled.parameter_types(name)


def test_names_that_stand_for_huge_trees_are_read_in_no_time() -> None:
    """S3_ is a<b, b>, S4_ is f<S3_, S3_>, S5_ is f<S4_, S4_>, and so on: the last one is a tree of 2^33 leaves."""
    numbers = [f"S{digit}_" for digit in "3456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    grown = "1aI1b1bE" + "".join(f"S_I{number * 2}E" for number in numbers)
    with pytest.raises(SpecError, match="cannot be expanded"):
        mangled.parameter_types(f"_Z1fIJ{grown}EEvDp1aI{numbers[-1]}E")


@settings(max_examples=500)
@given(
    st.one_of(
        st.text(alphabet="_ZNSTIJELXPKRDvpti013fa", max_size=60).map("_Z".__add__),
        st.tuples(st.sampled_from([name for name, _ in EXPECTED]), st.integers(0, 200), st.text(max_size=3)).map(
            lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + 1 :]
        ),
    )
)
def test_noise_gives_spec_errors_only(name: str) -> None:
    try:
        mangled.parameter_types(name)
    except SpecError as error:
        message = str(error)
    else:
        message = "."
    assert message.endswith(".")


def parameters(expected: str) -> tuple[Parameter, ...]:
    found, offset = [], 0
    for letter in expected:
        size = SIZES[letter]
        offset = -(-offset // min(size, 8)) * min(size, 8)
        found.append(Parameter(offset, size))
        offset += size
    return tuple(found)


@pytest.mark.parametrize(("name", "expected"), [case for case in EXPECTED if case[1] is not None])
def test_fields(name: str, expected: str) -> None:
    found = names.describe(name, parameters(expected))
    assert found.source is Source.NAME
    assert found.parameters == parameters(expected)
    by_offset = {field.offset: field for field in found.fields}
    for letter, parameter in zip(expected, found.parameters, strict=True):
        field = by_offset.get(parameter.offset)
        if letter in "iSdcfp":
            assert field is None
            continue
        assert field is not None
        assert field.size == parameter.size
        assert field.kind is (FieldKind.POINTER if letter in "rw" else FieldKind.SCAN)
        assert field.access == (Access.READ if letter == "r" else Access.READ | Access.WRITE)


def test_pointers_to_pointers_are_followed_once_removed() -> None:
    assert names.describe("_Z1fPKPKf", parameters("r")).indirect == Access.READ
    assert names.describe("_Z1fPKPf", parameters("r")).indirect == Access.READ | Access.WRITE
    assert names.describe("_Z1fPKf", parameters("r")).indirect == Access.NONE


def test_tensor_maps_by_value() -> None:
    (field,) = names.describe("_Z1f14CUtensorMap_sti", (Parameter(0, 128), Parameter(128, 4))).fields
    assert (field.kind, field.offset, field.size) == (FieldKind.TENSOR_MAP, 0, 128)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("_Z1fPi", "i"),
        ("_Z1fPi", "wi"),
        ("_Z1fPii", "w"),
        ("_Z1fIiEvNT_4typeE", "w"),
    ],
)
def test_names_that_contradict_the_layout_are_refused_or_scanned(name: str, layout: str) -> None:
    if name == "_Z1fIiEvNT_4typeE":
        (field,) = names.describe(name, parameters(layout)).fields
        assert field.kind is FieldKind.SCAN
        return
    with pytest.raises(SpecError):
        names.describe(name, parameters(layout))


TEMPLATES = """
template <class T, int n> struct Array { T items[n]; };
template <bool b, class T> struct enable_if { };
template <class T> struct enable_if<true, T> { using type = T; };
template <class T> struct is_float { static constexpr bool value = false; };
template <> struct is_float<float> { static constexpr bool value = true; };
namespace deep { namespace er {
template <int v, class F, class A> __global__ void elementwise(int n, F f, A data) {
    if (threadIdx.x < n) *(float *)data.items[0] = f(*(const float *)data.items[1]);
}
template <class T> struct Functor { T a; __device__ T operator()(T x) const { return a * x; } };
template <class T, typename enable_if<is_float<T>::value, int>::type = 0>
__global__ void restricted(const T *__restrict__ in, T *__restrict__ out) { *out = *in; }
template <class... T> __global__ void variadic(T *const... pointers) { (void(*pointers = T()), ...); }
template <class T, T value> __global__ void valued(T *out) { *out = value; }
template <template <class, int> class C, class T> __global__ void nested(const C<T, 3> *in, C<T, 3> out) { }
}
}
template __global__ void deep::er::elementwise<4>(int, deep::er::Functor<float>, Array<char *, 2>);
template __global__ void deep::er::restricted<float>(const float *, float *);
template __global__ void deep::er::variadic<float, int, double>(float *, int *, double *);
template __global__ void deep::er::valued<unsigned long, 7ul>(unsigned long *);
template __global__ void deep::er::nested<Array, char>(const Array<char, 3> *, Array<char, 3>);
"""


def test_names_fit_what_the_compiler_makes() -> None:
    layouts = cubin.layouts(compiled(TEMPLATES, cubin=True))
    found = {name: names.describe(name, layout) for name, layout in layouts.items()}
    access = {
        next(key for key in ("elementwise", "restricted", "variadic", "valued", "nested") if key in name): [
            (f.kind.name, int(f.access)) for f in item.fields
        ]
        for name, item in found.items()
    }
    assert access["elementwise"] == [("SCAN", 3)]
    assert access["restricted"] == [("POINTER", 1), ("POINTER", 3)]
    assert access["variadic"] == [("POINTER", 3)] * 3
    assert access["valued"] == [("POINTER", 3)]
    assert access["nested"] == [("POINTER", 1)]


def symbols(library: str) -> list[str]:
    text = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    found = {line.split()[-1].split("@")[0] for line in text.splitlines() if line}
    return sorted(name for name in found if name.startswith("_Z") and not name.startswith(("_ZT", "_ZG")))


def top_level(parameters: str) -> int:
    """How many parameters there are between the last pair of outer parentheses."""
    depth, count = 0, 1
    for before, letter in zip(" " + parameters, parameters, strict=False):
        depth += letter in "(<[{"
        depth -= letter in ")]}" or (letter == ">" and before != "-")
        count += letter == "," and depth == 0
    return count if parameters else 0


def last_parentheses(text: str) -> str | None:
    """What stands between the last parenthesis and the one that it closes, if a text ends in one."""
    if not text.endswith(")"):
        return None
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] == ")") - (text[at] == "(")
        if depth == 0:
            return text[at + 1 : -1]
    return None


def test_counts_agree_with_another_demangler() -> None:
    """The C++ standard library has a few thousand functions with every kind of type."""
    tool = shutil.which("c++filt") or shutil.which("llvm-cxxfilt")
    library = next(Path("/usr/lib").glob("*/libstdc++.so.6"), None)
    if tool is None or shutil.which("nm") is None or library is None:
        pytest.skip("There is no demangler, or no C++ library, to compare with")
    known = symbols(str(library))
    plain = subprocess.run([tool], input="\n".join(known), capture_output=True, text=True, check=True).stdout
    compared = 0
    lost: list[str] = []
    for name, text in zip(known, plain.splitlines(), strict=True):
        try:
            found = mangled.parameter_types(name)
        except SpecError as error:
            if "variable" not in str(error):
                lost.append(f"{name}: {error}")
            continue
        list_of = last_parentheses(re.sub(r"( const)?( volatile)?( &&?)?$", "", text))
        if list_of is not None:
            assert len(found) == top_level(list_of), text
            compared += 1
    assert not lost
    assert compared > 1000
