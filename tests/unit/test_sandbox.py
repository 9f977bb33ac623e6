"""Parts of the sandbox that need no box: the filter's jumps, comparison of outputs, the link."""

import os
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.errors import ConfigError
from drumroll.rewards.code import extract
from drumroll.sandbox import seccomp
from drumroll.sandbox.grading import same_output
from drumroll.sandbox.inside.examiner import same
from drumroll.sandbox.inside.link import OPERATIONS, Gone, Link, Remote

ALLOWED, REFUSED, MISSING, KILLED = 0x7FFF0000, 0x50001, 0x50026, 0x80000000


def decide(machine, number, argument=0, kernel=None):
    """What the filter says to a call: the kernel's own interpreter in a few lines."""
    data = struct.pack("<IIQQ", number, kernel or seccomp.MACHINES[machine][0], 0, argument)
    code = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    place, value = 0, 0
    while True:
        what, yes, no, k = code[place]
        place += 1
        if what == seccomp.RETURN:
            return k
        if what == seccomp.LOAD:
            value = struct.unpack_from("<I", data, k)[0]
        else:
            test = {seccomp.JUMP_EQUAL: value == k, seccomp.JUMP_AT_LEAST: value >= k, seccomp.JUMP_ANY_BIT: bool(value & k)}[
                what
            ]
            place += yes if test else no


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_the_filter_refuses_what_it_says_and_nothing_else(machine):
    column = seccomp.MACHINES[machine][1]
    refused = {numbers[column] for numbers in seccomp.REFUSED.values()}
    special = {seccomp.CLONE[column], seccomp.CLONE3[column], seccomp.PRLIMIT[column]}
    for number in range(500):
        if number not in special:
            assert decide(machine, number) == (REFUSED if number in refused else ALLOWED), number
    assert decide(machine, seccomp.CLONE[column], 0x11) == ALLOWED
    assert decide(machine, seccomp.CLONE[column], 0x3D0F00) == ALLOWED  # a thread
    for bit in (7, 17, 25, 26, 27, 28, 29, 30):
        assert decide(machine, seccomp.CLONE[column], 1 << bit) == REFUSED
    assert decide(machine, seccomp.CLONE3[column]) == MISSING
    assert decide(machine, seccomp.PRLIMIT[column], 0) == ALLOWED
    assert decide(machine, seccomp.PRLIMIT[column], 7) == REFUSED
    assert decide(machine, 1, kernel=0x40000003) == KILLED
    assert decide("x86_64", 0x40000000 + 1) == REFUSED


def test_other_machines_are_named():
    with pytest.raises(ConfigError, match="x86_64 and aarch64, not for 'riscv64'"):
        seccomp.program("riscv64")


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("9\n", "9", True), ("9 \n\n", "9\n", True), (" 9", "9", False), ("a\nb", "a b", False), ("", "", True), ("1", "1.0", True),
        ("0.33333333", "0.3333333", True), ("0.34", "0.33", False), ("x 1.0", "y 1.0", False), ("nan", "1.0", False),
        ("1000001", "1000000", False), ("passed", "9", False), ("2.5 a", "2.50 a", True), ("1.0 2", "1.0", False),
    ],
)  # fmt: skip
def test_outputs(printed, expected, equal):
    assert same_output(printed, expected) == equal


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        ((1, 2), [1, 2], True), ({1: 2}, {"1": 2}, True), ({1, 2}, [2, 1], True), (0.1 + 0.2, 0.3, True), ("a", ["a"], False),
        (None, None, True), (None, 0, False), ([1], [1, 2], False), ("1", 1, False), (3, 3.0, True), (float("inf"), float("inf"), True),
        ({"a": (1,)}, {"a": [1]}, True), ({"a": 1}, {}, False), ("1.0", 1.0, False),
    ],
)  # fmt: skip
def test_values(value, expected, equal):
    assert same(value, expected) == equal


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb\n```py\ny = 2\n```\n", "y = 2\n"),
        ("```\nx = 1", "x = 1"),
        ("```python\nx = 1\n```\n```\n\n```", "x = 1\n"),
        ("1. so:\n   ```python\n   x = 1\n   ```", "   x = 1\n"),
        ("use `x`", "use `x`"),
    ],
)
def test_the_last_block_is_the_program(completion, program):
    assert extract(completion) == program


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.fractions()
    | st.dates(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner) | st.sets(st.text())
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_cross_unchanged(value):
    link = Link(-1, -1, {})
    crossed = link.unpack(link.pack(value))
    assert crossed == value
    assert type(crossed) is type(value)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_nonsense_is_an_end_never_an_exception(answer):
    here, there = os.pipe()
    out = os.open(os.devnull, os.O_WRONLY)
    link = Link(here, out, {})
    try:
        from drumroll.sandbox.inside.link import send

        send(there, answer)
        os.close(there)
        try:
            Remote(link, 1)(1)
        except Gone:
            assert link.gone
    finally:
        os.close(here)
        os.close(out)


def test_both_ends_call_each_other():
    a, b = os.pipe(), os.pipe()
    server = Link(a[0], b[1], OPERATIONS)
    function = server.pack(lambda f, x: [f(f(v)) for v in x])
    thread = threading.Thread(target=server.serve)
    thread.start()
    client = Link(b[0], a[1], {"call": OPERATIONS["call"]})
    assert client.unpack(function)(lambda v: v + 1, [1, 2]) == [3, 4]
    with pytest.raises(ZeroDivisionError):
        client.unpack(function)(lambda v: v / 0, [1])
    os.close(a[1])
    thread.join()
    with pytest.raises(Gone):
        client.unpack(function)(abs, [1])
    for fd in (a[0], *b):
        os.close(fd)
